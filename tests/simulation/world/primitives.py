"""What the code under test gets instead of `threading`, `concurrent.futures` and `asyncio`: the same, on the scheduler.

Only what it uses is there. A name that is missing here fails loudly, as an AttributeError in the simulation.
"""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Self

from tests.simulation.world.scheduler import Scheduler, Task


class Lock:
    """threading.Lock and RLock."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler, self._reentrant = scheduler, reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: list[Task] = []

    def acquire(self, *, blocking: bool = True, timeout: float = -1) -> bool:
        self._scheduler.check_alive()
        task = self._scheduler.running
        if task is None:
            return True  # outside of any task, nothing else runs
        if not blocking and self._owner is not None:
            return False
        until = self._scheduler.now + timeout
        while self._owner is not None and not (self._reentrant and self._owner is task):
            if timeout < 0:
                self._scheduler.wait_in(self._waiters)
            elif not self._scheduler.wait_in(self._waiters, until - self._scheduler.now):
                return False
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        if self._scheduler.running is None:
            return
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._scheduler.wake(self._waiters)

    def free(self) -> bool:
        return self._owner is None

    def let_go(self) -> int:
        """Release it wholly; the depth to take up again."""
        depth, self._depth, self._owner = self._depth, 0, None
        self._scheduler.wake(self._waiters)
        return depth

    def take_up(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock) -> None:
        self._scheduler, self._lock = scheduler, lock
        self._waiters: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._scheduler.now + timeout
        while not predicate():
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                return False
            depth = self._lock.let_go()
            try:
                self._scheduler.wait_in(self._waiters, left)
            finally:
                self._lock.take_up(depth)
        return True

    def notify_all(self) -> None:
        self._scheduler.wake(self._waiters)


class Semaphore:
    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self._free, self._changed = count, Condition(scheduler, Lock(scheduler))

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0)
            self._free -= 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._scheduler.wake(self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._scheduler.wait_in(self._waiters, timeout)
        return self._set


class AsyncEvent(Event):
    """asyncio.Event: `wait` is awaited, always through `wait_for`, which gives the timeout."""

    def wait(self, timeout: float | None = None) -> Any:
        async def waiting(seconds: float | None) -> bool:
            return Event.wait(self, seconds)

        return _Waiting(waiting)


class _Waiting:
    def __init__(self, act: Callable[[float | None], Awaitable[bool]]) -> None:
        self.act = act

    def __await__(self) -> Any:
        return self.act(None).__await__()


class Thread:
    """`ident` is None until it has started."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple = (),
        kwargs: dict | None = None,
        daemon: bool = False,
    ) -> None:
        self._scheduler, self._name = scheduler, name
        self._act = lambda: target(*args, **(kwargs or {}))
        self._ended = Event(scheduler)
        self.ident: int | None = None

    def start(self) -> None:
        self.ident = self._scheduler.spawn(self._run, self._name).number

    def _run(self) -> None:
        self._act()
        self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._ended.is_set()


class Future:
    def __init__(self, scheduler: Scheduler) -> None:
        self._ended = Event(scheduler)
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, act: Callable[[], Any]) -> None:
        try:
            self.set_result(act())
        except Exception as error:  # noqa: BLE001 (whoever asks for the result gets it)
            self.set_exception(error)

    def set_result(self, result: Any) -> None:
        assert not self.done(), "a future has one result"
        self._result = result
        self._ended.set()

    def set_exception(self, error: BaseException) -> None:
        assert not self.done(), "a future has one result"
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._ended.wait()
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if error := self.exception():
            raise error
        return self._result


class Executor:
    """ThreadPoolExecutor: at most so many tasks at once, begun in the order of submission."""

    def __init__(self, scheduler: Scheduler, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._scheduler, self._free, self._name = scheduler, max_workers, thread_name_prefix
        self._group = scheduler.current.group
        self._queue: list[tuple[Future, Callable[[], Any]]] = []
        self._futures: list[Future] = []
        self._shut = False

    def submit(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future(self._scheduler)
        self._futures.append(future)
        self._queue.append((future, lambda: act(*args, **kwargs)))
        self._begin()
        return future

    def map(self, act: Callable[..., Any], values: Iterable[Any]) -> Iterator[Any]:
        for future in [self.submit(act, value) for value in values]:
            yield future.result()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._shut = True
        if cancel_futures:
            self._futures = [future for future in self._futures if all(future is not each for each, _ in self._queue)]
            self._queue.clear()
        if wait:
            wait_all(self._futures)

    def _begin(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            future, act = self._queue.pop(0)
            self._scheduler.spawn(partial(self._work, future, act), self._name, self._group)

    def _work(self, future: Future, act: Callable[[], Any]) -> None:
        future.run(act)
        self._free += 1
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def wait_all(futures: Iterable[Future]) -> None:
    """concurrent.futures.wait."""
    for future in futures:
        future.exception()


class Like:
    """A module, but for some names."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class FakeThreading:
    """The module `threading`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.local = threading.local
        self.Lock = lambda: Lock(scheduler)
        self.RLock = lambda: Lock(scheduler, reentrant=True)
        self.Condition = lambda lock: Condition(scheduler, lock)
        self.Event = lambda: Event(scheduler)
        self.Semaphore = self.BoundedSemaphore = lambda count: Semaphore(scheduler, count)
        self.Thread = lambda *args, **kwargs: Thread(scheduler, *args, **kwargs)
        self.get_ident = lambda: scheduler.current.number


class FakeLoop:
    """The event loop, as far as `coordinator.run.waiters` and the long polls look at it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def time(self) -> float:
        return self._scheduler.now

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, act: Callable[..., object], *args: Any) -> None:
        act(*args)

    call_soon = call_soon_threadsafe

    def call_later(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        self._scheduler.spawn(lambda: act(*args), "timer", delay_s=seconds)


class AsyncTask:
    """asyncio.Task: a coroutine on a task of its own, which can be awaited."""

    def __init__(self, scheduler: Scheduler, coroutine: Any) -> None:
        self._future = Future(scheduler)
        scheduler.spawn(lambda: self._future.run(lambda: drive(coroutine)), "coroutine")

    def __await__(self) -> Any:
        return self._ended().__await__()

    async def _ended(self) -> Any:
        return self._future.result()


class FakeAsyncio:
    """The module `asyncio`: coroutines that never really wait, but hand over to the scheduler inside."""

    def __init__(self, scheduler: Scheduler) -> None:
        loop = FakeLoop(scheduler)
        self.Event = lambda: AsyncEvent(scheduler)
        # Whoever wants to: so more orders are tried than there are in truth.
        self.Semaphore, self.Lock = lambda _: nullcontext(), nullcontext
        self.get_running_loop = lambda: loop
        self.create_task = partial(AsyncTask, scheduler)
        self._scheduler = scheduler

    async def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Around what never waits: bodies arrive at once, as far as the application sees."""
        yield

    async def wait_for(self, awaitable: Any, timeout: float | None) -> Any:
        if isinstance(awaitable, _Waiting):
            if not await awaitable.act(timeout):
                raise TimeoutError
            return True
        return await awaitable


def drive(coroutine: Any) -> Any:
    """Run a coroutine that never waits for a real event loop to its end."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{coroutine} waits for a real event loop; the simulation has none")
