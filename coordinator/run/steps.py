"""The run's place in its schedule: the inner steps before each round.

A round is as long as the most that one of its contributors has trained of it. So a round that all of them handed in
early, as they were stopped, takes the schedule on by no more than was trained, and the run has another round for the
rest. In two kinds of runs every round is a whole one, for the coordinator does not know how much of it was trained:
where fragments travel beside the training, of which it sees the rest in the next round, and where each worker has an H
of its own, which is smaller for one that was restarted.
"""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.tables import AssignmentRow, UnitRangeRow


def round_steps(run: LiveRun) -> int:
    """Return the steps of the schedule that the open or next round has; 0 once the run is over."""
    return min(run.spec.sync.schedule_steps, run.spec.total_inner_steps - run.step)


def expected_rounds(run: LiveRun) -> int:
    """Return how many rounds the run has in all, as far as is known by now."""
    left = run.spec.total_inner_steps - run.step
    return run.round + -(-left // run.spec.sync.schedule_steps)


def share_of(run: LiveRun, inner_steps: int) -> int:
    """Return what the open or next round has of H = `inner_steps`: all, unless the schedule ends before."""
    scheduled, steps = run.spec.sync.schedule_steps, round_steps(run)
    return inner_steps if steps == scheduled else max(-(-inner_steps * steps // scheduled), 1)


def steps_trained(run: LiveRun, session: Session) -> int:
    """Return by how many steps the open round, all of whose contributions are in, takes the schedule on."""
    steps, sync = round_steps(run), run.spec.sync
    if sync.streams or sync.inner_steps == "auto":
        return steps
    trained = (
        select(UnitRangeRow.worker, func.sum(UnitRangeRow.stop - UnitRangeRow.start).label("units"))
        .where(UnitRangeRow.run_id == run.id, UnitRangeRow.round == run.round)
        .where(UnitRangeRow.consumed_round == run.round)
        .group_by(UnitRangeRow.worker)
        .subquery()
    )
    assigned = select(trained.c.units, AssignmentRow.inner_steps).join(
        AssignmentRow, AssignmentRow.worker == trained.c.worker
    )
    rows = session.execute(assigned.where(AssignmentRow.run_id == run.id, AssignmentRow.round == run.round))
    return max((min(-(-steps * units // inner_steps), steps) for units, inner_steps in rows), default=0)
