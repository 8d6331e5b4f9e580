"""The opening of rounds: when there are enough workers, and who trains on what.

The workers get their units in worker-id order, so that who trains on what does not depend on who asked first.
"""

from coordinator.runs import pacing
from coordinator.runs.bell import ASSIGNMENTS
from coordinator.runs.live_run import Given, LiveRun, OpenFragment, OpenRound
from coordinator.runs.units import deal_units, holders
from coordinator.store.tables import AssignmentRow, FragmentRow, RoundRow
from protocol.messages import FragmentState, RunState


def open_next(run: LiveRun) -> bool:
    """Open the next round if there are enough workers for it; return True if it was. Otherwise the run says why not."""
    if run.open is not None:
        return False
    workers = sorted(run.members.leases.live() & (run.members.ready | run.members.previous))
    reason = _why_not(run, len(workers))
    if reason is not None:
        run.why_not_open = reason
        return False
    fragments = range(len(run.outer))
    opening = OpenRound(run.round, run.world.clock(), set(workers), [OpenFragment() for _ in fragments])
    with run.transition() as change:
        session = change.session
        session.add(RoundRow(run_id=run.id, round=run.round, opened_at=run.world.now(), closed_at=None))
        for index in fragments:
            collecting = FragmentState.COLLECTING
            session.add(FragmentRow(run_id=run.id, round=run.round, fragment=index, state=collecting, reason=""))
        opening.settled = set(workers) - holders(session, run.id)
        inner_steps = {worker: inner_steps_of(run, worker) for worker in workers}
        units = deal_units(session, change.row, run.round, inner_steps)
        for worker in workers:
            evaluate = worker == workers[0] and is_evaluated(run)
            opening.given[worker] = Given(inner_steps[worker], evaluate, units[worker])
            session.add(assignment_row(run, worker, opening.given[worker]))
        message = f"round {run.round} opened with {len(workers)} workers"
        change.record("round-opened", message, round=run.round, workers=workers)

        def apply() -> None:
            run.open = opening
            run.members.ready.clear()

        change.then(apply)
        change.wake(ASSIGNMENTS)
    return True


def _why_not(run: LiveRun, workers: int) -> str | None:
    """Why no round can be opened with so many workers; None where one can."""
    if run.state is not RunState.RUNNING:
        return f"the run is {run.state}"
    if run.damage is not None:
        return run.damage
    if not run.seeded:
        return "waiting for state 0" if run.seeder is None else f"{run.seeder} uploads state 0"
    if workers < run.policy.min_workers:
        return f"round {run.round} waits for workers: {workers} of at least {run.policy.min_workers} are ready"
    return None


def assignment_row(run: LiveRun, worker: str, given: Given) -> AssignmentRow:
    return AssignmentRow(
        run_id=run.id, round=run.round, worker=worker, inner_steps=given.inner_steps, evaluate=given.evaluate
    )


def is_evaluated(run: LiveRun) -> bool:
    """Return True if the state that the open or next round starts from is to be evaluated."""
    return run.round % run.spec.evaluation.every_rounds == 0


def inner_steps_of(run: LiveRun, worker: str) -> int:
    """H of `worker`, were it to begin now with the open or next round."""
    opening = run.open
    elapsed_s = 0.0 if opening is None else run.world.clock() - opening.opened_at
    return pacing.inner_steps(run.spec.sync, run.members.metrics[worker].inner_steps_per_second, elapsed_s)
