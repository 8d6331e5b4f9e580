"""Assignments: what each worker does next. A worker that arrives late joins the open round and gets the next free
units."""

from collections.abc import Sequence
from functools import partial

from sqlalchemy import delete, select

from coordinator.rounds import steering
from coordinator.rounds.opening import assignment_row, inner_steps_of, status, units_of
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.open_round import OpenRound, RoundAssignment
from coordinator.run.schedule import round_steps
from coordinator.run.units.carrying import carriable_units
from coordinator.run.units.ledger import assign_units, assigned_units, reclaim_units, return_forgotten_units
from coordinator.run.units.pools import pools_of
from coordinator.store.tables import AssignmentRow, CheckpointFragmentRow
from coordinator.trust import held_out
from coordinator.trust.evaluating import is_evaluated, is_missing
from coordinator.trust.quarantine import kept_out
from protocol.errors import Problem
from protocol.messages import Action, Assignment, RunState


def assign(
    run: LiveRun, worker: str, state_round: int | None, carried: Sequence[Sequence[int]] | None = None
) -> Assignment:
    """Return what `worker` does next. Idempotent.

    `state_round`: the state that it holds; None if it holds none. `carried`: the units of earlier rounds whose work it
    still has; None if it does not report them. Raises Problem `units-not-held` if that work must not be contributed any
    more.
    """
    with run.lock:
        if run.state is RunState.STOPPED:
            return _answer(run, Action.FINISH, "the run was stopped")
        if steering.must_leave(run, worker):
            return _answer(run, Action.FINISH, "the run is draining")
        if run.outer.damage is not None:
            return _answer(run, Action.WAIT, run.outer.damage)
        if not run.seeded:
            if _is_seeder(run, worker):
                return _answer(run, Action.SEED, "nobody has state 0 yet")
            return _answer(run, Action.WAIT, status(run))
        if run.redo is not None:
            return _answer(run, Action.WAIT, f"round {run.redo.state - 1} is being done again")
        if state_round == run.round and worker in run.members.stale:
            # It must drop its state. Sent to the state before, it loads a checkpoint.
            reason = f"round {run.round - 1} was done again: state {run.round} has changed"
            return _answer(run, Action.RECOVER, reason, round_=run.round - 1)
        if worker in run.members.stale:
            _note_dropped(run, worker)
        if state_round != run.round:
            reason = f"the run is at state {run.round}, this worker at {'none' if state_round is None else state_round}"
            return _answer(run, Action.RECOVER, reason)
        if run.state is RunState.FINISHED:
            evaluate = _is_final_evaluator(run, worker)
            return _answer(run, Action.FINISH, "the run is finished", evaluate=evaluate)

        if (run.open is None or worker not in run.open.assignments) and kept_out(run, [worker]):
            return _answer(run, Action.WAIT, f"{worker} is in quarantine: its contributions were left out too often")
        if carried and run.open is not None and run.open.began_without_earlier_units(worker):
            detail = f"{worker} began round {run.round} with no work of earlier rounds, after this request was sent"
            raise Problem("units-not-held", f"{detail}; drop that work")
        if carried or run.open is None:  # with an open round, most requests need no change
            with run.change() as change:  # opens the round if only this worker was missing
                if carried:
                    _check_carried(change, worker, carried)
                    pool = pools_of(change.session, run, [worker])[worker]
                    reclaim_units(change.session, pool, worker, run.round, carried)
                    if run.open is not None:
                        change.after_commit(partial(run.open.without_earlier_units.discard, worker))
                change.after_commit(partial(run.members.mark_ready, worker))
        opening = run.open
        if opening is None:
            return _answer(run, Action.WAIT, status(run))
        assignment = opening.assignments.get(worker)
        if assignment is None or not opening.agrees_on_earlier_units(worker, carried):
            assignment = _ensure_assignment(run, opening, worker, carried)
        return _training(run, opening, worker, assignment)


def _note_dropped(run: LiveRun, worker: str) -> None:
    """Note that the worker has dropped the state that the last round led to before it was done again."""
    with run.change() as change:
        last = change.row.rolled_back
        if last is not None and worker in last.get("stale", ()):
            change.row.rolled_back = last | {"stale": [each for each in last["stale"] if each != worker]}
        change.after_commit(partial(run.members.stale.discard, worker))


def _check_carried(change: Change, worker: str, carried: Sequence[Sequence[int]]) -> None:
    """Raise Problem `units-not-held` if the worker claims to carry more units than it can have work on."""
    claimed = sum(stop - start for start, stop in carried)
    most = carriable_units(change.session, change.run, worker)
    if claimed > most:
        detail = f"{worker} carries {claimed} work units, but was assigned only {most} since its last contribution"
        raise Problem("units-not-held", f"{detail}; drop that work")


def assign_from_memory(
    run: LiveRun, worker: str, state_round: int | None, carried: Sequence[Sequence[int]] | None
) -> Assignment | None:
    """Return the result of `assign` if memory alone is enough: a live worker of the open round asks. Otherwise None.

    Takes no lock. The answer is correct as of the moment when it reads the open round.
    """
    opening = run.open
    if opening is None or opening.number != state_round:
        return None
    if run.state is not RunState.RUNNING or run.outer.damage is not None:
        return None
    assignment = opening.assignments.get(worker)
    if assignment is None or worker not in run.members or worker in run.members.stale or run.redo is not None:
        return None
    if not opening.agrees_on_earlier_units(worker, carried):
        return None
    return _training(run, opening, worker, assignment)


def _answer(
    run: LiveRun, action: Action, reason: str, *, evaluate: bool = False, round_: int | None = None
) -> Assignment:
    """Return the assignment of a worker that has nothing to train on (wait, recover, seed or finish). `round_`: the
    state that it is about, if not the run's. The caller holds the run's lock."""
    return Assignment(
        action=action,
        reason=reason,
        round=run.round if round_ is None else round_,
        step=run.step,
        schedule_steps=round_steps(run),
        evaluate=evaluate,
        redone=run.redone,
    )


def _training(run: LiveRun, opening: OpenRound, worker: str, assignment: RoundAssignment) -> Assignment:
    handed_out_at = opening.handed_out.setdefault(worker, run.context.clock())
    if opening.begun_at is None and not run.members.is_quarantined(worker, opening.number):
        opening.begun_at = handed_out_at
    return Assignment(
        action=Action.TRAIN,
        reason=f"round {opening.number} is open",
        round=opening.number,
        step=opening.step,
        schedule_steps=opening.steps,
        # A restarted worker has lost time: it trains on as many of its units as it still manages.
        inner_steps=min(assignment.inner_steps, inner_steps_of(run, opening, worker)),
        units=[list(unit_range) for unit_range in assignment.units],
        evaluate=assignment.evaluate,
        redone=run.redone,
    )


def _ensure_assignment(
    run: LiveRun, opening: OpenRound, worker: str, carried: Sequence[Sequence[int]] | None
) -> RoundAssignment:
    """Return the worker's assignment for the open round from the database. Create it if there is none."""
    with run.change() as change:
        row = _take_part(change, opening, worker)
        if carried is not None:
            return_forgotten_units(change.session, run.id, worker, run.round, carried)
        units = assigned_units(change.session, run.id, worker, run.round)
        if not units:  # its lease had ended, and they returned to the pool
            pool = pools_of(change.session, run, [worker])[worker]
            units = assign_units(change.session, pool, worker, run.round, units_of(run, row.inner_steps))
        assignment = RoundAssignment(row.inner_steps, row.evaluate, units)
        change.after_commit(partial(opening.assign, worker, assignment, carried))
    return assignment


def _take_part(change: Change, opening: OpenRound, worker: str) -> AssignmentRow:
    """Return the worker's row for the open round. Create it if there is none. It evaluates if the round has too few
    evaluators with other tokens; with private data every worker does."""
    run, session = change.run, change.session
    row = session.get(AssignmentRow, (run.id, run.round, worker))
    if row is None:
        asked = session.scalars(
            select(AssignmentRow.worker).where(
                AssignmentRow.run_id == run.id, AssignmentRow.round == run.round, AssignmentRow.evaluate
            )
        ).all()
        evaluate = is_evaluated(run) and (run.spec.data.private or not asked or is_missing(run, worker, asked))
        row = assignment_row(run, worker, RoundAssignment(inner_steps_of(run, opening, worker), evaluate, []))
        session.add(row)
        change.record("entered", f"{worker} entered round {run.round} while it was open", worker=worker)
    return row


def _is_seeder(run: LiveRun, worker: str) -> bool:
    """Return True if `worker` must upload state 0. The first worker that asks becomes the seeder; if it is replaced,
    the next one uploads all fragments again."""
    now = run.context.clock()
    if run.members.seeder is None and run.members.may_seed(worker, now):
        with run.change() as change:
            change.session.execute(delete(CheckpointFragmentRow).where(CheckpointFragmentRow.run_id == run.id))
            change.record("seeding", f"{worker} uploads state 0", worker=worker)
            change.after_commit(partial(run.members.appoint_seeder, worker, now))
    return run.members.seeder == worker


def _is_final_evaluator(run: LiveRun, worker: str) -> bool:
    """Return True if `worker` should evaluate the final state: the first workers that ask, with different tokens. With
    private data, every worker that has not done so yet."""
    with run.context.database.read() as session:
        done = held_out.evaluations(session, run.id, run.round)
        if worker in done or (held_out.ALL in done):
            return False
        if run.spec.data.private:
            return True
    if worker in run.members.evaluators:
        return True
    if not is_missing(run, worker, run.members.evaluators | set(done)):
        return False
    with run.change() as change:
        change.after_commit(partial(run.members.evaluators.add, worker))
    return True
