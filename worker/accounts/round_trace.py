"""The spans of a worker, where it is traced (`tracing.py`): a round, within it the phases of the training loop
and the stages on other threads; and what requests carry of them.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from outerstep.common import tracing
from protocol.messages import Stage

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Request(Protocol):
    """The part of `httpx.Request` that is used."""

    @property
    def headers(self) -> MutableMapping[str, str]: ...


class RoundTrace:
    """The spans of one worker of the run `run`. The training loop says where it is; any thread may be in a stage."""

    def __init__(self, run: str, created_at: float, worker: str, rank: int | None = None) -> None:
        self._run, self._created_at = run, created_at
        self._about: dict[str, str | int] = {"outerstep.run": run, "outerstep.worker": worker}
        if rank is not None:
            self._about["outerstep.rank"] = rank
        self._number: int | None = None  # of the round, or of the next one; None before the first
        self._round: Span | None = None
        self._phase: Span | None = None

    def begin_round(self, number: int) -> None:
        """Be in this round from now on."""
        self.end()
        self._number = number
        self._round = self._begin("round", None)

    def end_round(self, number: int) -> None:
        """End the round `number`: what comes is a part of the next one."""
        self.end()
        self._number = number + 1

    def phase(self, stage: Stage) -> None:
        """Be in this phase from now on."""
        if self._phase is not None:
            self._phase.end()
        self._phase = self._begin(stage, self._round)

    def end(self) -> None:
        """End what is under way."""
        for span in (self._phase, self._round):
            if span is not None:
                span.end()
        self._phase = self._round = None

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Trace the block, on whatever thread, as a stage of the round."""
        with tracing.current(self._begin(stage, self._round or self._phase, nested=True)):
            yield

    def mark(self, request: Request) -> None:
        """Let a request carry what it is a part of: the stage that this thread is in, or else the phase."""
        within = tracing.at()
        about = self._phase or self._round
        if within is None and about is not None:
            within = tracing.of(about)
        if within is not None:
            tracing.carry(request.headers, within)

    def _begin(self, name: str, parent: "Span | None", *, nested: bool = False) -> "Span":
        about, number = self._about, self._number
        trace_id = None if number is None else tracing.round_trace(self._run, self._created_at, number)
        if number is not None:
            about = {**about, "outerstep.round": number}
        within = tracing.at() if nested else None
        if within is None and parent is not None:
            within = tracing.of(parent)
        return tracing.begin(name, about, trace_id=trace_id, within=within)
