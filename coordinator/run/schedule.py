"""The run's position in its schedule: the inner steps before each round.

A round advances the schedule by the steps of the contributor that trained most of it. If all workers were stopped and
contributed early, that is less than a whole round, and the run has another round for the rest. In two cases the
coordinator cannot know how much of a round was trained, and counts every round as a whole one: when fragments are sent
during training, because the rest arrives in the next round; and when each worker has its own H, because a restarted
worker gets a smaller one.
"""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.run.step_rates import first_steps
from coordinator.store.tables import AssignmentRow, UnitRangeRow


def round_steps(run: LiveRun) -> int:
    """Return the schedule steps of the open or next round, if all of it will be trained; 0 once the run is over."""
    return min(_whole_round(run, run.round), run.spec.total_inner_steps - run.step)


def _whole_round(run: LiveRun, round_: int) -> int:
    """Return the schedule steps of a round. Where each worker has its own H, the first one is short: nobody's speed is
    known."""
    sync = run.spec.sync
    return first_steps(sync.inner_steps) if sync.wait == "never" and round_ == 0 else sync.inner_steps


def expected_rounds(run: LiveRun) -> int:
    """Return the total number of rounds of the run, if all remaining ones are whole."""
    left = run.spec.total_inner_steps - run.step
    if left == 0:
        return run.round
    return run.round + 1 + -(-(left - round_steps(run)) // run.spec.sync.inner_steps)


def steps_trained(run: LiveRun, session: Session) -> int:
    """Return by how many steps the open round advances the schedule. All its contributions must have arrived."""
    steps, sync = round_steps(run), run.spec.sync
    if sync.streams:
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
