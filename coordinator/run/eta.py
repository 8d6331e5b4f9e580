"""How long a run will still take, by its last rounds: guessed here, for all who are told."""

from itertools import pairwise

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.store.tables import RoundRow
from outerstep.common.quantities import PACE_ROUNDS, remaining_s
from protocol.messages import RunState


def eta_s(session: Session, run_id: int, state: RunState, left: int, now: float) -> float | None:
    """Return the seconds that the run's `left` rounds will take from `now` on: 0 once it is over, None while nobody
    knows, for no round has been published yet or no other is to open."""
    if state in (RunState.FINISHED, RunState.STOPPED):
        return 0.0
    if state is not RunState.RUNNING:
        return None
    closed = select(RoundRow.opened_at, RoundRow.closed_at).where(
        RoundRow.run_id == run_id, RoundRow.closed_at.is_not(None)
    )
    rows = session.execute(closed.order_by(RoundRow.round.desc()).limit(PACE_ROUNDS)).all()
    if not rows:
        return None
    # From one end to the next, so that the time between two rounds is in it.
    ends = [rows[-1].opened_at, *(row.closed_at for row in reversed(rows))]
    return remaining_s([max(end - start, 0.0) for start, end in pairwise(ends)], left, max(now - ends[-1], 0.0))
