"""The guard of a run: what follows where its model looks spoilt, as `guard` in its spec says.

What was found is an event, `spoilt`, in one transaction with the pause; it says too to which checkpoint the run is to
go back. That waits for the jobs that are under way, so it is done at a later tick (`upkeep/rolling_back.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import Change, LiveRun
from coordinator.screening.spoilt import BOUND, LESS, Part, risen, stopped_falling, suspects
from coordinator.store.tables import CheckpointRow, EvaluationRow, EventRow, FragmentRow
from coordinator.trust import held_out
from protocol.messages import Evaluation, RunState

GUARD = "the guard"

F32 = npt.NDArray[np.float32]


@dataclass
class Extent:
    """The largest magnitude among the values of a state, NaN where one of them is that."""

    largest: float = 0.0

    def watch(self, chunks: Iterator[tuple[F32, F32]]) -> Iterator[tuple[F32, F32]]:
        """Yield the chunks (θ, u), and look at them."""
        for chunk in chunks:
            for values in chunk:
                self.largest = float(np.maximum(self.largest, np.maximum(values.max(), -values.min())))
            yield chunk

    @property
    def is_bounded(self) -> bool:
        return self.largest <= BOUND


def look_at_the_extent(change: Change, extent: Extent, state: int, fragment: int) -> None:
    """After an outer step: tell of values that have left their bounds in `state`, and pause the run in any case."""
    if not extent.is_bounded:
        message = f"state {state}, fragment {fragment}: its largest value is {extent.largest:.3g}, beyond {BOUND:g}"
        _spoilt(change, message, state, good=state - 1, pauses=True)


def look_at_the_loss(change: Change) -> None:
    """After an evaluation: record a held-out loss that has risen, and pause the run unless the spec says otherwise; or
    one that has stopped falling while the contributions of some workers differ from the others'."""
    guard = change.run.spec.guard
    change.session.flush()
    losses = _losses(change)
    rise = risen(losses, guard.loss_rise)
    if rise is None:
        _look_at_a_flat_loss(change, losses)
    else:
        message = (
            f"the held-out loss has risen to {rise.loss:.4f} nats per token at state {rise.round}; the lowest was "
            f"{rise.lowest:.4f}, and state {rise.good} was the last one near it"
        )
        _spoilt(change, message, rise.round, good=rise.good, pauses=guard.action != "tell")


def _look_at_a_flat_loss(change: Change, losses: Sequence[tuple[int, float]]) -> None:
    """Record an event, once for the same workers, if the held-out loss has stopped falling and some stand out since."""
    lowest = stopped_falling(losses)
    if lowest is None:
        return
    state, loss = lowest
    recorded = change.session.scalars(
        select(EventRow.data).where(EventRow.run_id == change.run.id, EventRow.kind == "suspected")
    )
    known = {worker for data in recorded for worker in data["workers"]}
    workers = [worker for worker in suspects(_parts(change, state), LESS) if worker not in known]
    if workers:
        message = (
            f"the held-out loss has not fallen since state {state} ({loss:.4f} nats per token). Since then, the "
            f"contributions of {', '.join(workers)} were mostly shortened or left out, or had less than {LESS:.0%} of "
            "the usual agreement with the others"
        )
        change.record("suspected", message, state=state, workers=workers)


def has_paused(session: Session, run: LiveRun) -> bool:
    """Return True while the run is paused by the guard, and nobody has said anything about it since."""
    if run.state is not RunState.PAUSED:
        return False
    last = session.scalars(
        select(EventRow.kind)
        .where(EventRow.run_id == run.id, EventRow.kind.in_(("spoilt", "rolled-back", *RunState, "drained")))
        .order_by(EventRow.id.desc())
        .limit(1)
    ).first()
    return last == "spoilt"


def _spoilt(change: Change, message: str, state: int, *, good: int, pauses: bool) -> None:
    """Record that the model is spoilt after state `good`, and what follows."""
    run = change.run
    if not pauses or run.ended:
        change.record("spoilt", message, state=state, good=good, to=None, without=[])
        return
    to, without = None, list[str]()
    if run.spec.guard.action == "rollback":
        to, why = _target(change, good)
        if to is None:
            message = f"{message}. {why}"
        else:
            without = suspects(_parts(change, to))
            message = f"{message}. The run is to go back to state {to}, without: {', '.join(without) or 'nobody'}"
    else:
        message = f"{message}. The run is paused"
    change.record("spoilt", message, state=state, good=good, to=to, without=without)
    change.set_state(RunState.PAUSED)
    change.wake()


def _target(change: Change, good: int) -> tuple[int | None, str]:
    """Return the checkpoint to go back to; or None, and why there is none."""
    run, session = change.run, change.session
    to = session.scalars(
        select(CheckpointRow.round)
        .where(CheckpointRow.run_id == run.id, CheckpointRow.round <= good)
        .order_by(CheckpointRow.round.desc())
        .limit(1)
    ).first()
    if to is None:
        return None, "No checkpoint of before is kept, so the run is paused"
    back_then = session.scalars(
        select(EventRow.data).where(EventRow.run_id == run.id, EventRow.kind == "rolled-back")
    ).all()
    if any(data["by"] == GUARD and data["round"] == to for data in back_then):
        return None, f"It went back to state {to} before, and that did not help, so the run is paused"
    return to, ""


def _parts(change: Change, since: int) -> dict[str, Sequence[Part]]:
    """Return what each worker has had in each delta from round `since` on."""
    rows = change.session.scalars(
        select(FragmentRow.verdicts).where(FragmentRow.run_id == change.run.id, FragmentRow.round >= since)
    )
    parts: dict[str, list[Part]] = {}
    for verdicts in rows:
        for worker, verdict in verdicts.items():
            parts.setdefault(worker, []).append(Part(verdict["factor"], verdict["cosine"]))
    return dict(parts)


def _losses(change: Change) -> list[tuple[int, float]]:
    """Return the held-out loss of each state of which it is confirmed, in order; of those after the one of which the
    guard has spoken last, unless the run went back from there: what was told once is judged anew."""
    run, session = change.run, change.session
    last = session.scalars(
        select(EventRow)
        .where(EventRow.run_id == run.id, EventRow.kind.in_(("spoilt", "rolled-back")))
        .order_by(EventRow.id.desc())
        .limit(1)
    ).first()
    since = last.data["state"] if last is not None and last.kind == "spoilt" else -1
    rows = session.scalars(
        select(EvaluationRow)
        .where(EvaluationRow.run_id == run.id, EvaluationRow.round > since, EvaluationRow.confirmed)
        .order_by(EvaluationRow.round)
    )
    by_state: dict[int, list[Evaluation]] = {}
    for row in rows:
        by_state.setdefault(row.round, []).append(held_out.evaluation(row))
    means = {round_: held_out.mean(each) for round_, each in by_state.items()}
    return [(round_, mean.loss) for round_, mean in means.items() if mean is not None]
