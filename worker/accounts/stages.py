"""What is measured on all threads of a worker: the seconds of each stage, the payload bytes, and trace spans.

Stages are timed by a stopwatch that counts the time during which at least one thread was in the stage. So a stage's
seconds never exceed the clock's, however many threads work on it, and stages that overlap show it. A thread is in one
stage at a time: an inner `with` interrupts the outer one, so waiting for a delta ends where its download begins.

If tracing is on (outerstep/common/tracing.py), a round is a span; inside it are the phases of the training loop, and
the stages on other threads. Requests carry the trace context.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import ParamSpec, Protocol, TypeVar

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from outerstep.common import tracing
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


class Request(Protocol):
    """The part of `httpx.Request` that is used."""

    @property
    def headers(self) -> MutableMapping[str, str]: ...


class RoundTrace:
    """The spans of one worker of the run `run`. The training loop sets the round and the phase; any thread may be in a
    stage."""

    def __init__(self, run: str, created_at: float, worker: str, rank: int | None = None) -> None:
        self._run, self._created_at = run, created_at
        self._about: dict[str, str | int] = {"outerstep.run": run, "outerstep.worker": worker}
        if rank is not None:
            self._about["outerstep.rank"] = rank
        self._number: int | None = None  # of the current or the next round; None before the first
        self._round: Span | None = None
        self._phase: Span | None = None

    def begin_round(self, number: int) -> None:
        """Enter this round."""
        self.end()
        self._number = number
        self._round = self._begin("round", None)

    def end_round(self, number: int) -> None:
        """End the round `number`: what follows belongs to the next one."""
        self.end()
        self._number = number + 1

    def phase(self, stage: Stage) -> None:
        """Enter this phase."""
        if self._phase is not None:
            self._phase.end()
        self._phase = self._begin(stage, self._round)

    def end(self) -> None:
        """End the current phase and round."""
        for span in (self._phase, self._round):
            if span is not None:
                span.end()
        self._phase = self._round = None

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Trace the block, on any thread, as a stage of the round."""
        with trace.use_span(self._begin(stage, self._round or self._phase, nested=True), end_on_exit=True):
            yield

    def mark(self, request: Request) -> None:
        """Add the trace context to a request: this thread's stage, or else the phase."""
        within = tracing.current_context()
        about = self._phase or self._round
        if within is None and about is not None:
            within = trace.set_span_in_context(about, Context())
        if within is not None:
            propagate.inject(request.headers, within)

    def _begin(self, name: str, parent: Span | None, *, nested: bool = False) -> Span:
        about, number = self._about, self._number
        trace_id = None if number is None else tracing.round_trace_id(self._run, self._created_at, number)
        if number is not None:
            about = {**about, "outerstep.round": number}
        within = tracing.current_context() if nested else None
        if within is None and parent is not None:
            within = trace.set_span_in_context(parent, Context())
        return tracing.start_span(name, about, trace_id=trace_id, parent=within)


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
        self.trace: RoundTrace | None = None  # if tracing is on

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
        traced: AbstractContextManager[None] = nullcontext() if self.trace is None else self.trace.stage(stage)
        try:
            with traced:
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
