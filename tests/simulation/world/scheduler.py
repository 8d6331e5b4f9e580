"""A virtual clock, and tasks that run one at a time in an order that a seeded random generator chooses.

A task is a greenlet: it runs real, blocking code until that code sleeps, waits or asks the network, and then hands over
to the scheduler, which advances the clock to the next event. Tasks belong to a group, which is one simulated process:
killing a group ends its tasks where they stand, as kill -9 ends threads. Nothing here waits for real time.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any

import greenlet

FOREVER = None
DAY_S = 86_400.0


class Killed(BaseException):
    """The simulated process of this task is dead. Nothing in the code under test may swallow it."""


class Group:
    """One simulated process.

    frozen_until  its machine sleeps, so nothing of it runs before then
    skew_s        how far its machine's wall clock is ahead of the true time
    """

    def __init__(self, name: str, skew_s: float = 0.0) -> None:
        self.name, self.skew_s = name, skew_s
        self.dead = False
        self.frozen_until = 0.0
        self.tasks: list[Task] = []
        self.indivisible = 0  # > 0: no other task runs in between, as inside a transaction


class Task:
    def __init__(self, number: int, group: Group, act: Callable[[], object], name: str, hub: greenlet.greenlet) -> None:
        self.number, self.group = number, group
        self.name = name
        self.wakes = 0  # how often it was resumed: an event meant for an earlier wait is stale
        self.done = False
        self.started = False
        self.greenlet = greenlet.greenlet(act, hub)


class Scheduler:
    """`run` is the hub: it resumes one task after the other. Everything else is called by tasks."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 1000.0
        self.steps = 0
        self.rng = rng
        self.failure: BaseException | None = None
        self._events: list[tuple[float, float, int, Task, int, Any]] = []
        self._number = self._tasks = 0
        self._hub = greenlet.getcurrent()
        self.running: Task | None = None  # the one that runs; None: the hub does
        self.ran: Group | None = None  # that of the task of the last step
        self._doomed: list[Group] = []

    # --- for tasks ------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Task:
        assert self.running is not None, "only tasks may wait"
        return self.running

    def spawn(self, act: Callable[[], object], name: str, group: Group | None = None, delay_s: float = 0.0) -> Task:
        """A new task, of the caller's group unless another is given."""
        self._tasks += 1
        task = Task(self._tasks, group or self.current.group, lambda: self._live(task, act), name, self._hub)
        task.group.tasks.append(task)
        self._at(self.now + delay_s, task, None)
        return task

    def sleep(self, seconds: float) -> None:
        self._at(self.now + max(seconds, 0.0), self.current, None)
        self._park()

    def wait_in(self, waiters: list[Task], timeout_s: float | None = FOREVER) -> bool:
        """Wait until `wake` picks this task out of `waiters`; False when the time is up first."""
        task = self.current
        waiters.append(task)
        if timeout_s is not None:
            self._at(self.now + max(timeout_s, 0.0), task, False)
        try:
            return bool(self._park())
        finally:
            if task in waiters:
                waiters.remove(task)

    def wake(self, waiters: list[Task]) -> None:
        """Let everybody in `waiters` go on, in random order."""
        for task in waiters:
            self._at(self.now, task, True)
        waiters.clear()

    def kill(self, group: Group) -> None:
        """End every task of `group`. A caller that belongs to it raises Killed next."""
        group.dead = True
        self._doomed.append(group)

    def check_alive(self) -> None:
        if self.running is not None and self.running.group.dead:
            raise Killed

    # --- the hub --------------------------------------------------------------------------------------------------

    def run(self, after_step: Callable[[], None]) -> None:
        """Resume tasks until none is left to resume, or `after_step` or a task fails; raises what failed."""
        while self._events:
            at, _, _, task, wakes, value = heapq.heappop(self._events)
            if task.done or task.wakes != wakes:
                continue
            if task.group.frozen_until > max(at, self.now):
                self._at(task.group.frozen_until, task, value)
                continue
            self.now = max(self.now, at)
            self.steps += 1
            self.ran = task.group
            self._resume(task, value)
            while self._doomed:
                self._bury(self._doomed.pop(0))
            if self.failure is not None:
                raise self.failure
            after_step()

    def _live(self, task: Task, act: Callable[[], object]) -> None:
        try:
            act()
        except Killed:
            if not task.group.dead:
                self.failure = AssertionError(f"{task.name} was killed, but its process lives")
        except BaseException as error:  # noqa: BLE001 (the hub raises it)
            if self.failure is None and not task.group.dead:
                self.failure = error
        finally:
            task.done = True
            task.group.tasks.remove(task)

    def _resume(self, task: Task, value: Any) -> None:
        task.wakes += 1
        task.started = True
        self.running = task
        task.greenlet.switch(value) if task.wakes > 1 else task.greenlet.switch()
        self.running = None

    def _bury(self, group: Group) -> None:
        for task in list(group.tasks):
            if task.started:
                self.running = task
                task.greenlet.throw(Killed())
                self.running = None
                assert task.done, f"{task.name} survived its process: something swallowed Killed"
            else:
                task.done = True
                group.tasks.remove(task)

    def _park(self) -> Any:
        task = self.current
        if task.group.dead:
            raise Killed
        assert not task.group.indivisible, f"{task.name} waits inside a transaction"
        value = self._hub.switch()
        if task.group.dead:
            raise Killed
        return value

    def _at(self, when: float, task: Task, value: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self.rng.random(), self._number, task, task.wakes, value))
