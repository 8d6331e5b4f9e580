"""What is measured on all threads of a worker: the seconds of each stage, and the payload bytes.

Stages are timed by a stopwatch that counts the time during which at least one thread was in the stage. So a stage's
seconds never exceed the clock's, however many threads work on it, and stages that overlap show it. A thread is in one
stage at a time: an inner `with` interrupts the outer one, so waiting for a delta ends where its download begins.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from protocol.messages import Stage


class Traffic:
    """Counts the payload bytes moved since the worker started, including repeated attempts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.upload_bytes = 0
        self.download_bytes = 0

    def add(self, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self.upload_bytes += up
            self.download_bytes += down


T = TypeVar("T")
P = ParamSpec("P")

_inner: ContextVar[Stage | None] = ContextVar("stage", default=None)  # the innermost stage of this thread


class Stages:
    """A stopwatch for all threads of a worker. Thread-safe. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._threads: Counter[Stage] = Counter()
        self._since: dict[Stage, float] = {}
        self._seconds: dict[Stage, float] = {}

    def move(self, left: Stage | None, entered: Stage | None) -> None:
        """Note that one thread leaves a stage and enters another at the same instant."""
        with self._lock:
            now = self._clock()
            if entered is not None:
                self._threads[entered] += 1
                self._since.setdefault(entered, now)
            if left is not None:
                self._threads[left] -= 1
                if not self._threads[left]:
                    self._add(left, now - self._since.pop(left))

    @contextmanager
    def __call__(self, stage: Stage) -> Iterator[None]:
        """Count this thread into `stage` while the block runs."""
        outer = _inner.get()
        self.move(outer, stage)
        _inner.set(stage)
        try:
            yield
        finally:
            _inner.set(outer)
            self.move(stage, outer)

    def during(self, stage: Stage, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`; count this thread into `stage` until they end."""
        with self(stage):
            yield from items

    def timed(self, stage: Stage, call: Callable[P, T]) -> Callable[P, T]:
        """Return `call`, whose thread is counted into `stage` while it runs."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            with self(stage):
                return call(*args, **kwargs)

        return timed

    def take(self) -> dict[Stage, float]:
        """Return the seconds of every stage since the last `take`. Running stages continue: what follows counts for the
        next call."""
        with self._lock:
            now = self._clock()
            for stage, since in self._since.items():
                self._add(stage, now - since)
                self._since[stage] = now
            seconds, self._seconds = self._seconds, {}
            return seconds

    def _add(self, stage: Stage, seconds: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
