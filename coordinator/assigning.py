"""Assignments: what each worker does next, and the opening of rounds.

When a round opens, its workers get their units in worker-id order, so that who trains on what does not depend on who
asked first. A worker that comes later takes part in the open round with the next units.
"""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from coordinator import pacing, seeding, steering
from coordinator.bell import ASSIGNMENTS
from coordinator.live_run import Given, LiveRun, OpenFragment, OpenRound
from coordinator.tables import AssignmentRow, EvaluationRow, FragmentRow, RoundRow
from coordinator.units import (
    assign_units,
    assigned_units,
    deal_units,
    holders,
    reclaim_units,
    return_forgotten_units,
)
from protocol.messages import Action, Assignment, FragmentState, RunState


def assign(
    run: LiveRun, worker: str, state_round: int | None, carried: Sequence[Sequence[int]] | None = None
) -> Assignment:
    """What `worker`, which holds the state `state_round` (None: no state), does next. Asking again changes nothing.

    `carried`: the units of earlier rounds that it still has the work of; None where it does not say. Problem
    `units-not-held` where that work must not be contributed any more.
    """
    with run.lock:
        if run.state is RunState.STOPPED:
            return Assignment(action=Action.FINISH, reason="the run was stopped", round=run.round)
        if steering.leaves(run, worker):
            return Assignment(action=Action.FINISH, reason="the run is draining", round=run.round)
        if run.damage is not None:
            return Assignment(action=Action.WAIT, reason=run.damage, round=run.round)
        if not run.seeded:
            if seeding.appoint(run, worker):
                return Assignment(action=Action.SEED, reason="nobody has state 0 yet", round=0)
            return Assignment(action=Action.WAIT, reason=f"{run.seeder} uploads state 0", round=0)
        if state_round != run.round:
            reason = f"the run is at state {run.round}, this worker at {'none' if state_round is None else state_round}"
            return Assignment(action=Action.RECOVER, reason=reason, round=run.round)
        if run.state is RunState.FINISHED:
            evaluate = _evaluates_final(run, worker)
            return Assignment(action=Action.FINISH, reason="the run is finished", round=run.round, evaluate=evaluate)

        if carried:
            with run.world.database.write() as session:  # before others are dealt what lies in the pool
                reclaim_units(session, run.id, worker, run.round, carried)
        run.ready.add(worker)
        try_open(run)
        if run.open is None:
            return Assignment(action=Action.WAIT, reason=standing(run), round=run.round)
        given = run.open.given.get(worker)
        if given is None or not _is_settled(run.open, worker, carried):
            given = _give(run, run.open, worker, carried)
        return _training(run, run.open, worker, given)


def known(
    run: LiveRun, worker: str, state_round: int | None, carried: Sequence[Sequence[int]] | None
) -> Assignment | None:
    """What `assign` says to a live worker of the open round, where that is in memory; else None. Takes no lock: all
    that it looks at was so at one moment, the one at which it found the round open."""
    opening = run.open
    if opening is None or opening.number != state_round or run.state is not RunState.RUNNING or run.damage is not None:
        return None
    given = opening.given.get(worker)
    if given is None or worker not in run.leases or not _is_settled(opening, worker, carried):
        return None
    return _training(run, opening, worker, given)


def _is_settled(opening: OpenRound, worker: str, carried: Sequence[Sequence[int]] | None) -> bool:
    """Whether there is nothing to compare: the worker carries no units of earlier rounds and holds none, or does not
    say."""
    return carried is None or (not carried and worker in opening.settled)


def _training(run: LiveRun, opening: OpenRound, worker: str, given: Given) -> Assignment:
    return Assignment(
        action=Action.TRAIN,
        reason=f"round {opening.number} is open",
        round=opening.number,
        # A restarted worker has lost time: of its units it trains on those that it still manages.
        inner_steps=min(given.inner_steps, _inner_steps(run, worker)),
        units=[list(unit_range) for unit_range in given.units],
        evaluate=given.evaluate,
    )


def _give(run: LiveRun, opening: OpenRound, worker: str, carried: Sequence[Sequence[int]] | None) -> Given:
    """The worker's assignment for the open round, from the database; made where it has none. Holds the lock."""
    with run.world.database.write() as session:
        row = _take_part(run, session, worker)
        if carried is not None:
            return_forgotten_units(session, run.id, worker, run.round, carried)
        units = assigned_units(session, run.id, worker, run.round)
        if not units:  # its lease had ended, and they went back to the pool
            units = assign_units(session, run.row(session), worker, run.round, row.inner_steps)
    opening.assigned.add(worker)
    given = opening.given[worker] = Given(row.inner_steps, row.evaluate, units)
    if carried is not None and not carried:
        opening.settled.add(worker)
    return given


def standing(run: LiveRun) -> str:
    """Say what the run is at, in one sentence that is true in each of its states.

    Without the lock, what it says was so at one moment or another.
    """
    opening = run.open
    if run.ended:
        return f"the run is {run.state}"
    if opening is None:
        return why_not_open(run) or f"round {run.round} is about to open"
    so_far = f"round {opening.number} is open"
    return so_far if run.state is RunState.RUNNING else f"{so_far}, and the run is {run.state}: no other opens"


def why_not_open(run: LiveRun) -> str | None:
    """Say why the next round does not open; None where there is no reason."""
    if run.state is not RunState.RUNNING:
        return f"the run is {run.state}"
    if run.damage is not None:
        return run.damage
    if run.layout is None:
        return "waiting for the first worker"
    if not run.seeded:
        return "waiting for state 0" if run.seeder is None else f"{run.seeder} uploads state 0"
    ready = len(_ready(run))
    if ready < run.policy.min_workers:
        return f"round {run.round} waits for workers: {ready} of at least {run.policy.min_workers} are ready"
    return None


def _ready(run: LiveRun) -> set[str]:
    """The workers that the next round would open with."""
    return run.leases.live() & (run.ready | run.previous)


def try_open(run: LiveRun) -> None:
    """Open the next round if nothing stands against it. Holds the lock."""
    if run.open is not None or why_not_open(run) is not None:
        return
    workers = sorted(_ready(run))
    assert run.layout is not None
    count = len(run.layout.fragments)
    opening = OpenRound(run.round, run.world.clock(), set(workers), [OpenFragment() for _ in range(count)])
    with run.world.database.write() as session:
        session.add(RoundRow(run_id=run.id, round=run.round, opened_at=run.world.now(), closed_at=None))
        for fragment in range(count):
            session.add(
                FragmentRow(
                    run_id=run.id,
                    round=run.round,
                    fragment=fragment,
                    state=FragmentState.COLLECTING,
                    reason="",
                )
            )
        opening.settled = set(workers) - holders(session, run.id)
        inner_steps = {worker: _inner_steps(run, worker) for worker in workers}
        units = deal_units(session, run.row(session), run.round, inner_steps)
        for worker in workers:
            evaluate = worker == workers[0] and _is_evaluated(run)
            opening.given[worker] = Given(inner_steps[worker], evaluate, units[worker])
            session.add(_row(run, worker, opening.given[worker]))
        run.record(
            session,
            "round-opened",
            f"round {run.round} opened with {len(workers)} workers",
            round=run.round,
            workers=workers,
        )
    run.open = opening
    run.ready.clear()
    run.wake(ASSIGNMENTS)


def _take_part(run: LiveRun, session: Session, worker: str) -> AssignmentRow:
    """The worker's assignment for the open round, made where it has none. The first worker of a round evaluates."""
    row = session.get(AssignmentRow, (run.id, run.round, worker))
    if row is None:
        first = session.query(AssignmentRow).filter_by(run_id=run.id, round=run.round).count() == 0
        row = _row(run, worker, Given(_inner_steps(run, worker), first and _is_evaluated(run), []))
        session.add(row)
        run.record(session, "entered", f"{worker} entered round {run.round} while it was open", worker=worker)
    return row


def _row(run: LiveRun, worker: str, given: Given) -> AssignmentRow:
    return AssignmentRow(
        run_id=run.id, round=run.round, worker=worker, inner_steps=given.inner_steps, evaluate=given.evaluate
    )


def _is_evaluated(run: LiveRun) -> bool:
    """Whether the state that the open round starts from is."""
    return run.round % run.spec.evaluation.every_rounds == 0


def _inner_steps(run: LiveRun, worker: str) -> int:
    opening = run.open
    elapsed_s = 0.0 if opening is None else run.world.clock() - opening.opened_at
    return pacing.inner_steps(run.spec.sync, run.metrics[worker].inner_steps_per_second, elapsed_s)


def _evaluates_final(run: LiveRun, worker: str) -> bool:
    """Whether `worker` measures the final state: the first that asks, unless somebody has done so."""
    with run.world.database.read() as session:
        if session.get(EvaluationRow, (run.id, run.round)) is not None:
            return False
    if run.evaluator is None:
        run.evaluator = worker
    return run.evaluator == worker
