"""Opening rounds: when there are enough workers, and which units each worker trains on. Also what a run waits for, in
words.

Workers get their units in worker-id order, so the order of their requests does not matter.
"""

from coordinator.run import step_rates
from coordinator.run.decide import OverdueHeartbeat, describe_silence, describe_stalled
from coordinator.run.live_run import LiveRun
from coordinator.run.open_round import OpenFragment, OpenRound, RoundAssignment
from coordinator.run.schedule import round_steps
from coordinator.run.units.ledger import deal_units, return_unclaimed_units, workers_with_units
from coordinator.run.units.pools import pools_of
from coordinator.run.waiters import ASSIGNMENTS
from coordinator.store.database import Fault
from coordinator.store.tables import AssignmentRow, FragmentRow, RoundRow
from coordinator.trust.evaluating import evaluators
from coordinator.trust.quarantine import kept_out
from protocol.messages import Cause, FragmentState, RunState


def status(run: LiveRun) -> str:
    """Return in a few words what the run is doing.

    Without the lock, the parts of the answer may be from different moments during the call.
    """
    opening = run.open
    if run.ended:
        return f"the run is {run.state}"
    if (fault := fault_of(run)) is not None:
        return fault.reason
    if opening is None:
        return why_not_open(run) or f"round {run.round} is about to open"
    so_far = f"round {opening.number} is open"
    return so_far if run.state is RunState.RUNNING else f"{so_far}; the run is {run.state}, so no other round opens"


def fault_of(run: LiveRun) -> Fault | None:
    """Return the fault of the run's files, the disk or the database; None if there is none. While there is one, it
    explains whatever the run waits for."""
    if run.ended:
        return None
    if run.outer.damage is not None:
        return Fault(Cause.FILES_DAMAGED, run.outer.damage)
    return run.context.storage_fault()


def waits_for(run: LiveRun, fragment: OpenFragment) -> str:
    """Return what a fragment of the open round waits for."""
    fault = fault_of(run)
    return fragment.reason if fault is None else fault.reason


def awaited_silent_workers(run: LiveRun) -> dict[str, OverdueHeartbeat]:
    """Return the silent workers that hold up the next round, or state 0."""
    silent = run.members.silent(run.context.clock())
    if not run.seeded:
        return {worker: each for worker, each in silent.items() if worker == run.members.seeder}
    present = _candidates(run)
    if len(present) >= run.spec.members.min_workers:
        return {}
    return {worker: each for worker, each in silent.items() if worker not in present}


def why_not_open(run: LiveRun) -> str | None:
    """Return why the next round does not open; None if it can."""
    if run.state is not RunState.RUNNING:
        return f"the run is {run.state}"
    if run.outer.damage is not None:
        return run.outer.damage
    if run.model is None:
        return "waiting for the first worker"
    if not run.seeded:
        seeder = run.members.seeder
        return _with_silence(
            run, "waiting for state 0" if seeder is None else f"waiting for {seeder} to upload state 0"
        )
    stalled, least = run.members.stalled(run.context.clock()), run.spec.members.min_workers
    ready = len(_candidates(run) - stalled.keys())
    if ready < least:
        waiting = f"round {run.round} waits for workers: {ready} of at least {least} are ready"
        refused = "".join(f"; {worker} cannot join: {why}" for worker, why in list(run.members.refused.items())[-1:])
        return _with_silence(run, waiting) + (f"; {describe_stalled(stalled)}" if stalled else "") + refused
    return None


def _with_silence(run: LiveRun, waiting: str) -> str:
    silent = awaited_silent_workers(run)
    return f"{describe_silence(silent)}; {waiting}" if silent else waiting


def _candidates(run: LiveRun) -> set[str]:
    found = run.members.candidates()
    return found - kept_out(run, found)


def open_next(run: LiveRun) -> bool:
    """Open the next round if it can be opened; return True if it was."""
    if run.open is not None or why_not_open(run) is not None:
        return False
    workers = sorted(_candidates(run))
    fragments = range(len(run.outer.states))
    opening = OpenRound(
        *(run.round, run.step, round_steps(run), run.context.clock()),
        *(set(workers), [OpenFragment() for _ in fragments], fastest_rate(run)),
    )
    with run.change() as change:
        session, now = change.session, run.context.now()
        session.add(RoundRow(run_id=run.id, round=run.round, step=run.step, opened_at=now, closed_at=None))
        for index in fragments:
            collecting = FragmentState.COLLECTING
            session.add(FragmentRow(run_id=run.id, round=run.round, fragment=index, state=collecting, reason=""))
        if kept_rounds := run.spec.sync.kept_rounds:
            return_unclaimed_units(session, run.id, run.members.live(), run.round - kept_rounds)
        opening.without_earlier_units = set(workers) - workers_with_units(session, run.id)
        inner_steps = {worker: inner_steps_of(run, opening, worker) for worker in workers}
        counts = {worker: units_of(run, steps) for worker, steps in inner_steps.items()}
        units = deal_units(session, pools_of(session, run, workers), run.round, counts)
        evaluating = evaluators(run, session, workers)
        for worker in workers:
            opening.assignments[worker] = RoundAssignment(inner_steps[worker], worker in evaluating, units[worker])
            session.add(assignment_row(run, worker, opening.assignments[worker]))
        message = f"round {run.round} opened with {len(workers)} workers"
        change.record("round-opened", message, round=run.round, workers=workers)
        change.begin_round(opening)
        change.wake(ASSIGNMENTS)
    return True


def assignment_row(run: LiveRun, worker: str, assignment: RoundAssignment) -> AssignmentRow:
    """Return the row of a worker's assignment for the open or next round."""
    return AssignmentRow(
        run_id=run.id, round=run.round, worker=worker, inner_steps=assignment.inner_steps, evaluate=assignment.evaluate
    )


def units_of(run: LiveRun, inner_steps: int) -> int:
    """Return the number of units of a worker with H = `inner_steps` in the open or next round: more than H if it trains
    on until the round's deltas are there. The last round has no next one to carry that into."""
    last = run.step + round_steps(run) == run.spec.total_inner_steps
    return inner_steps if last else run.spec.sync.most_steps_of(inner_steps)


def inner_steps_of(run: LiveRun, opening: OpenRound, worker: str) -> int:
    """Return H of `worker` for the round if it starts to train now; less if the schedule ends in that round. The
    time counts from when the first one began: all come late together if a round was done again, as they recover."""
    sync = run.spec.sync
    if sync.wait == "always":
        return opening.steps
    rate = _rate(run, worker)
    if rate is None or opening.fastest is None:
        return min(step_rates.first_steps(sync.inner_steps), opening.steps)
    elapsed_s = 0.0 if opening.begun_at is None else run.context.clock() - opening.begun_at
    return step_rates.inner_steps(opening.steps, rate, opening.fastest, elapsed_s)


def fastest_rate(run: LiveRun) -> float | None:
    """Return the inner steps per second of the fastest worker whose contributions count, as far as it is credible; None
    if no rate is known, or if all workers have the same H."""
    if run.spec.sync.wait == "always":
        return None
    counted = run.members.contributing(run.members.live()) - run.members.quarantined(run.round)
    rates = {worker: rate for worker in counted if (rate := _rate(run, worker)) is not None}
    return step_rates.fastest(rates, run.members.owners) if rates else None


def _rate(run: LiveRun, worker: str) -> float | None:
    return run.step_rates.believed(worker, run.members.metrics(worker).inner_steps_per_second)
