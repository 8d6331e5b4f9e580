"""Assignments: what each worker does next. One that comes late takes part in the open round with the next units."""

from collections.abc import Sequence
from functools import partial

from sqlalchemy import delete

from coordinator.runs import steering
from coordinator.runs.live_run import Change, Given, LiveRun, OpenRound
from coordinator.runs.opening import assignment_row, inner_steps_of, is_evaluated, standing
from coordinator.runs.units import assign_units, assigned_units, reclaim_units, return_forgotten_units
from coordinator.store.tables import AssignmentRow, CheckpointFragmentRow, EvaluationRow
from protocol.messages import Action, Assignment, RunState


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
            if _seeds(run, worker):
                return Assignment(action=Action.SEED, reason="nobody has state 0 yet", round=0)
            return Assignment(action=Action.WAIT, reason=f"{run.seeder} uploads state 0", round=0)
        if state_round != run.round:
            reason = f"the run is at state {run.round}, this worker at {'none' if state_round is None else state_round}"
            return Assignment(action=Action.RECOVER, reason=reason, round=run.round)
        if run.state is RunState.FINISHED:
            evaluate = _evaluates_final(run, worker)
            return Assignment(action=Action.FINISH, reason="the run is finished", round=run.round, evaluate=evaluate)

        with run.change() as change:  # and so the round is opened, where only this worker was waited for
            if carried:
                reclaim_units(change.session, run.id, worker, run.round, carried)
                if run.open is not None:
                    change.then(partial(run.open.settled.discard, worker))
            change.then(lambda: run.members.ready.add(worker))
        opening = run.open
        if opening is None:
            return Assignment(action=Action.WAIT, reason=standing(run), round=run.round)
        given = opening.given.get(worker)
        if given is None or not _is_settled(opening, worker, carried):
            given = _give(run, opening, worker, carried)
        return _training(run, opening, worker, given)


def known(
    run: LiveRun, worker: str, state_round: int | None, carried: Sequence[Sequence[int]] | None
) -> Assignment | None:
    """What `assign` says to a live worker of the open round, where that is in memory; else None. Takes no lock: all
    that it looks at was so at one moment, the one at which it found the round open."""
    opening = run.open
    if opening is None or opening.number != state_round or run.state is not RunState.RUNNING or run.damage is not None:
        return None
    given = opening.given.get(worker)
    if given is None or worker not in run.members.leases or not _is_settled(opening, worker, carried):
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
        inner_steps=min(given.inner_steps, inner_steps_of(run, worker)),
        units=[list(unit_range) for unit_range in given.units],
        evaluate=given.evaluate,
    )


def _give(run: LiveRun, opening: OpenRound, worker: str, carried: Sequence[Sequence[int]] | None) -> Given:
    """The worker's assignment for the open round, from the database; made where it has none."""
    with run.change() as change:
        row = _take_part(change, worker)
        if carried is not None:
            return_forgotten_units(change.session, run.id, worker, run.round, carried)
        units = assigned_units(change.session, run.id, worker, run.round)
        if not units:  # its lease had ended, and they went back to the pool
            units = assign_units(change.session, change.row, worker, run.round, row.inner_steps)
        given = Given(row.inner_steps, row.evaluate, units)

        def apply() -> None:
            opening.assigned.add(worker)
            opening.given[worker] = given
            if carried is not None and not carried:
                opening.settled.add(worker)

        change.then(apply)
    return given


def _take_part(change: Change, worker: str) -> AssignmentRow:
    """The worker's row for the open round, made where it has none. The first worker of a round evaluates."""
    run, session = change.run, change.session
    row = session.get(AssignmentRow, (run.id, run.round, worker))
    if row is None:
        first = session.query(AssignmentRow).filter_by(run_id=run.id, round=run.round).count() == 0
        row = assignment_row(run, worker, Given(inner_steps_of(run, worker), first and is_evaluated(run), []))
        session.add(row)
        change.record("entered", f"{worker} entered round {run.round} while it was open", worker=worker)
    return row


def _seeds(run: LiveRun, worker: str) -> bool:
    """Return True if `worker` is the one to seed state 0. The first that asks is; a successor starts afresh."""
    if run.seeder is None:
        with run.change() as change:
            change.session.execute(delete(CheckpointFragmentRow).where(CheckpointFragmentRow.run_id == run.id))
            change.record("seeding", f"{worker} uploads state 0", worker=worker)
            change.then(lambda: setattr(run, "seeder", worker))
    return run.seeder == worker


def _evaluates_final(run: LiveRun, worker: str) -> bool:
    """Whether `worker` measures the final state: the first that asks, unless somebody has done so."""
    with run.world.database.read() as session:
        if session.get(EvaluationRow, (run.id, run.round)) is not None:
            return False
    if run.evaluator is None:
        run.evaluator = worker
    return run.evaluator == worker
