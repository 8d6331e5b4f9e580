"""Doing the last round again without contributions that have harmed the model (`trust/leaving_out.py`).

The deltas of the last round are made again from the stored contributions, without those of the left-out workers. One
transaction then puts them in place of the old ones: the open round is dropped, the workers are quarantined, their units
return to the pool, and the outer state goes back to a checkpoint before the round, from which it is derived again. Then
the dropped round opens anew, and every worker fetches the state that it now starts from. Its earlier rows and blobs are
set aside, as after a rollback.

Before the commit, nothing has changed. A crash before it leaves blobs that no row names, which the next start deletes;
the order is restored from the measurements. A crash after it leaves state files, which are derived again.
"""

import json
import logging
from collections.abc import Callable
from functools import partial

from sqlalchemy import delete, select, update

from coordinator.aggregation.fragment import ContributionsLost, ResidualLost, blob_of, make_delta, stored
from coordinator.aggregation.tasks import Collected
from coordinator.run.live_run import Change, LiveRun, Redo, RedoneDelta
from coordinator.run.outer import State
from coordinator.run.units.ledger import free_consumed, merge_adjacent, return_since
from coordinator.store.payloads import StoredPayload
from coordinator.store.tables import (
    CheckpointFragmentRow,
    CheckpointRow,
    FragmentRow,
    OuterStateRow,
    RoundRow,
    WorkerRow,
)
from coordinator.sync import checkpointing, delegating, outer_state, retention
from coordinator.sync.deltas import collected_again
from coordinator.trust import evaluating, guard, quarantine
from coordinator.upkeep import rolling_back
from outerstep.common.quantities import natural
from outerstep.common.ranges import merged
from protocol.errors import OuterstepError
from protocol.messages import RunState
from protocol.wire import ContributionHeader

logger = logging.getLogger(__name__)


class _Impossible(OuterstepError):
    """The round cannot be done again; the message says why."""


def restore(run: LiveRun) -> None:
    """Restore an order that an earlier process has not carried out, and who may hold the state that one has dropped."""
    with run.change() as change:
        last = change.row.rolled_back or {}
        run.redone = last.get("redone", 0)
        if last.get("round") == run.round:
            run.members.stale.update(last.get("stale", ()))
        evaluating.note_harmful(change)


def redo_if_due(run: LiveRun, *, verifying: Callable[[], bool]) -> None:
    """Carry out the run's order, if there is one: first make the deltas on another thread, then put them in place.
    Called at every tick."""
    with run.lock:
        redo = run.redo
        if redo is None or redo.making:
            return
        if redo.state != run.round or run.state is RunState.STOPPED:
            _give_up(run, redo, f"state {redo.state} is not the run's any more")
        elif redo.made is None:
            redo.making = True
            run.context.submit(_make, run, redo)
        elif not (verifying() or run.outer.any_job_running):
            put_in_place(run, redo, redo.made)


def _make(run: LiveRun, redo: Redo) -> None:
    """Make the round's deltas without the left-out contributions, and put them into the store."""
    try:
        with run.context.database.read() as session:
            rows = session.scalars(
                select(FragmentRow)
                .where(FragmentRow.run_id == run.id, FragmentRow.round == redo.state - 1)
                .order_by(FragmentRow.fragment)
            ).all()
        redo.made = [make_fragment(run, redo, row) for row in rows]
    except Exception as error:  # nothing awaits the job
        if run.context.storage_failed(error) is not None:
            return  # the next tick tries again
        if not isinstance(error, _Impossible | ContributionsLost | ResidualLost):
            logger.exception("%s: round %d cannot be done again", run.name, redo.state - 1)
        with run.lock:
            _give_up(run, redo, str(error))
    finally:
        redo.making = False


def make_fragment(run: LiveRun, redo: Redo, row: FragmentRow) -> RedoneDelta:
    """Make a fragment's new delta and put it into the store. Raises ContributionsLost, ResidualLost and _Impossible."""
    before, found = collected_again(run, row), collected_again(run, row, redo.found)
    if before is None or found is None:
        raise _Impossible("its contributions are not kept any more, or none is left")
    collected, factors = found
    content, residual = make_delta(collected, run.blobs, factors)
    delta, kept = stored(collected, content, residual, run.blobs, run.context.memory)
    units = {worker: _units_of(run, before[0], worker) for worker in redo.found if worker in before[0].contributions}
    return RedoneDelta(delta, kept, units)


def _units_of(run: LiveRun, collected: Collected, worker: str) -> list[list[int]]:
    """Return the units that a contribution has consumed."""
    with StoredPayload(run.blobs.open(blob_of(collected, worker))) as payload:
        assert isinstance(payload.header, ContributionHeader)
        return payload.header.units


def put_in_place(run: LiveRun, redo: Redo, made: list[RedoneDelta]) -> None:
    """Replace the deltas, and everything that follows from them. The caller holds the lock."""
    state, rows = redo.state, _checkpoint_before(run, redo.state)
    if rows is None:
        _give_up(run, redo, "no checkpoint from before it is kept")
        return
    prefix = rolling_back.next_prefix(run)
    later = [(table, state) for table in (*rolling_back.OF_ROUNDS, *rolling_back.OF_STATES)]
    run.blobs.put(f"{prefix}rows.json", json.dumps(rolling_back.history(run, later), indent=1).encode())
    run.suspend()
    opening = run.open
    try:
        with run.change() as change:
            opened = change.session.get(RoundRow, (run.id, state))
            step = run.step if opened is None else opened.step
            _replace_deltas(change, redo, made)
            _return_units(change, redo, made)
            for table, first in later:
                change.session.execute(delete(table).where(table.run_id == run.id, table.round >= first))
            for row in rows:
                change.session.execute(
                    update(OuterStateRow)
                    .where(OuterStateRow.run_id == run.id, OuterStateRow.fragment == row.fragment)
                    .values(round=row.round, state_digest=row.state_digest)
                )
            change.go_back(state, step)
            stale = list(change.session.scalars(select(WorkerRow.name).where(WorkerRow.run_id == run.id)))
            of_redo = {"stale": stale, "redone": run.redone + 1}
            change.row.rolled_back = {"round": state, "from_round": run.round, "place": prefix} | of_redo
            guard.note_redone(change, state)
            _record(change, redo, prefix)
            change.after_commit(partial(run.members.stale.update, stale))
            change.after_commit(run.members.evaluators.clear)
            change.after_commit(partial(setattr, run, "redo", None))
            change.after_commit(partial(setattr, run, "redone", run.redone + 1))
            change.wake()
        opening = None
        if not delegating.is_possible(run):
            for row in rows:
                outer_state.fetch_checkpoint(run, row)
        run.outer.begin([State(row.round, row.state_digest) for row in rows], here=False)
        run.context.back_up(alone=True)  # if this or the next fails, the run goes on all the same
        rolling_back.set_aside(run, state, prefix)
    finally:
        run.restored(opening)


def _checkpoint_before(run: LiveRun, state: int) -> list[CheckpointFragmentRow] | None:
    """Return the fragments of the newest intact checkpoint of a state before `state`; None if there is none."""
    fragment = CheckpointFragmentRow
    with run.context.database.read() as session:
        rounds = session.scalars(
            select(CheckpointRow.round)
            .where(CheckpointRow.run_id == run.id, CheckpointRow.round < state)
            .order_by(CheckpointRow.round.desc())
        ).all()
        kept = [
            list(
                session.scalars(
                    select(fragment)
                    .where(fragment.run_id == run.id, fragment.round == round_)
                    .order_by(fragment.fragment)
                )
            )
            for round_ in rounds
        ]
    return next((rows for rows in kept if all(checkpointing.is_intact(run, row) for row in rows)), None)


def _replace_deltas(change: Change, redo: Redo, made: list[RedoneDelta]) -> None:
    for fragment, each in enumerate(made):
        row = change.session.get_one(FragmentRow, (change.run.id, redo.state - 1, fragment))
        row.delta_bytes, row.delta_digest = each.delta.size, each.delta.digest
        if each.residual is not None:
            row.residual_bytes, row.residual_digest = each.residual.size, each.residual.digest
        row.verdicts = {
            worker: verdict | {"factor": 0.0, "reason": _reason(redo, worker)} if worker in redo.found else verdict
            for worker, verdict in row.verdicts.items()
        }


def _reason(redo: Redo, worker: str) -> str:
    measured = ", ".join(
        f"{without:.4f} instead of {loss:.4f} ({evaluator})" for evaluator, loss, without in redo.found[worker]
    )
    return f"without it, the held-out loss of state {redo.state} is {measured} nats per token"


def _return_units(change: Change, redo: Redo, made: list[RedoneDelta]) -> None:
    """Return to the pool the units of the dropped round and those of the left-out contributions, which no model has
    seen."""
    run, session = change.run, change.session
    returned = return_since(session, run.id, redo.state)
    for worker in redo.found:
        units = merged(sorted({(start, stop) for each in made for start, stop in each.units.get(worker, [])}))
        freed = free_consumed(session, run.id, redo.state - 1, units)
        change.worker_row(worker).tokens -= sum(stop - start for start, stop in freed) * run.unit_tokens(worker)
        returned += freed
    rolling_back.note_returned(change, sorted(returned))
    merge_adjacent(session, run.id, redo.state, settled=retention.oldest_checkpoint(run))


def _record(change: Change, redo: Redo, prefix: str) -> None:
    round_, names = redo.state - 1, sorted(redo.found, key=natural)
    reasons = "; ".join(f"{worker}: {_reason(redo, worker)}" for worker in names)
    message = f"round {round_} was done again without {', '.join(names)}. {reasons}. Rows of round {redo.state} are in "
    change.record("redone", f"{message}{prefix}", round=round_, workers=names, place=prefix)
    _quarantine(change, redo)


def _quarantine(change: Change, redo: Redo) -> None:
    rows = select(WorkerRow).where(WorkerRow.run_id == change.run.id, WorkerRow.name.in_(redo.found))
    for row in change.session.scalars(rows):
        quarantine.expel(change, row, redo.state - 1, _reason(redo, row.name))


def _give_up(run: LiveRun, redo: Redo, why: str) -> None:
    """Only quarantine the workers: the round cannot be done again. The caller holds the lock."""
    with run.change() as change:
        names = sorted(redo.found, key=natural)
        message = f"round {redo.state - 1} was harmed by {', '.join(names)}, and cannot be done again: {why}"
        change.record("redone", message, round=redo.state - 1, workers=names, place=None)
        _quarantine(change, redo)
        change.after_commit(partial(setattr, run, "redo", None))
        change.wake()
