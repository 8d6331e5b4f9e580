"""Going back to an earlier state: a rollback to a checkpoint, or a database restored from a backup.

The guard rolls a run back if it finds the model spoilt; an operator may ask for it too. Afterwards the run is as it was
when that state was reached: its round, its position in the schedule, its work units. Rows and blobs of later rounds are
moved to `set-aside/`, the rows as one JSON file beside the blobs, so that an operator can inspect or delete them. Every
worker joins again, and has to recover the state.

The rollback is one transaction. Before its commit, nothing has changed. A crash after it leaves blobs that no row
names, which the next start sets aside or deletes, and state files, which it derives again from the checkpoint.

A database restored from a backup may be older than the blobs beside it. The database is authoritative: the run
continues from its round. Newer blobs belong to a history that the database does not have, and are set aside as well.
"""

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from sqlalchemy import delete, select, update

from coordinator.run.live_run import Change, LiveRun
from coordinator.run.units.ledger import merge_adjacent, return_since, return_units
from coordinator.run.units.pools import all_pools
from coordinator.store.blobs import KINDS, Kind, round_of
from coordinator.store.identity import Actor
from coordinator.store.tables import (
    AssignmentRow,
    CheckpointFragmentRow,
    CheckpointRow,
    ContributionRow,
    EvaluationRow,
    FragmentRow,
    LateContributionRow,
    OuterStateRow,
    ReportRow,
    RoundRow,
    RunRow,
    WorkerRow,
)
from coordinator.sync import checkpointing, outer_state
from coordinator.trust import guard
from outerstep.common.ranges import Range
from protocol.errors import Problem
from protocol.messages import RollBack, RunState, WorkerState

_BUSY_S = 1.0
OF_ROUNDS = (RoundRow, FragmentRow, AssignmentRow, ContributionRow, LateContributionRow, ReportRow)
OF_STATES = (EvaluationRow, CheckpointRow, CheckpointFragmentRow)  # state N exists before round N


def roll_back_if_due(run: LiveRun, *, verifying: Callable[[], bool]) -> None:
    """Execute a rollback that the guard has ordered, unless an operator has changed the run since. Called at every
    tick."""
    if run.state is not RunState.PAUSED or run.spec.guard.action != "rollback":
        return
    with run.context.database.read() as session:
        ordered = guard.record_of(session.get_one(RunRow, run.id))
    if ordered.to is None:
        return
    order = RollBack(to=ordered.to, from_round=run.round, without=list(ordered.without))
    try:
        roll_back(run, order, Actor(), who=guard.GUARD, verifying=verifying, resume=bool(order.without))
    except Problem as problem:
        if problem.slug == "not-ready":
            return  # the next tick tries again
        with run.change() as change:
            guard.drop_order(change, problem.detail)


def roll_back(
    run: LiveRun,
    order: RollBack,
    by: Actor,
    *,
    verifying: Callable[[], bool],
    who: str = "the operator",
    resume: bool = False,
) -> None:
    """Make checkpoint `order.to` the run's state. `verifying` returns True while the run's files are being verified.
    With `resume` the run then continues from there, whatever its state was.

    Raises Problem: not-found (no such checkpoint, or it is damaged; no such worker), rolled-back, not-ready (a job is
    working on the run's files).
    """
    to = order.to
    for row in _checkpoint(run, to):
        if not checkpointing.is_intact(run, row):
            raise Problem(
                "not-found", f"fragment {row.fragment} of checkpoint {to} is damaged on disk: choose another one"
            )
    with run.lock:
        if run.round < order.from_round:
            detail = f"the run {run.name} is at state {run.round}, and was at {order.from_round} when you asked"
            raise Problem("rolled-back", f"{detail}: it was rolled back meanwhile")
        rows = _checkpoint(run, to)
        if verifying() or run.outer.any_job_running:
            raise Problem("not-ready", f"files of the run {run.name} are still being worked on", retry_after_s=_BUSY_S)
        prefix = next_prefix(run)
        run.blobs.put(f"{prefix}rows.json", json.dumps(history(run, _later_than(to)), indent=1).encode())
        run.suspend()
        opening = run.open
        try:
            with run.change() as change:
                _reset(change, to, rows)
                _end_leases_and_ban(change, order.without)
                _record(change, to, prefix, order.without, who)
                change.audit(by, "rolled-back", f"rolled the run back to state {to}")
                if resume:
                    change.set_state(RunState.RUNNING)
            opening = None
            for row in rows:
                outer_state.fetch_checkpoint(run, row)
            outer_state.restore(run)
            run.context.back_up(alone=True)  # if this or the next fails, the run goes on all the same
            set_aside(run, to, prefix)
        finally:
            run.restored(opening)


def _checkpoint(run: LiveRun, round_: int) -> list[CheckpointFragmentRow]:
    with run.context.database.read() as session:
        if session.get(CheckpointRow, (run.id, round_)) is None:
            kept = session.scalars(
                select(CheckpointRow.round).where(CheckpointRow.run_id == run.id).order_by(CheckpointRow.round)
            ).all()
            there = ", ".join(map(str, kept)) or "none yet"
            raise Problem("not-found", f"the run {run.name} has no checkpoint {round_}; those kept are: {there}")
        return list(
            session.scalars(
                select(CheckpointFragmentRow)
                .where(CheckpointFragmentRow.run_id == run.id, CheckpointFragmentRow.round == round_)
                .order_by(CheckpointFragmentRow.fragment)
            )
        )


def _later_than(state: int) -> list[tuple[Any, int]]:
    """Return each table with a round column, and the first round in it that is later than `state`."""
    return [(table, state) for table in OF_ROUNDS] + [(table, state + 1) for table in OF_STATES]


def history(run: LiveRun, later: Sequence[tuple[Any, int]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that are about to be deleted, by table. `later`: each table, and the first round in it."""
    history: dict[str, list[dict[str, Any]]] = {}
    with run.context.database.read() as session:
        for table, first in later:
            columns = table.__table__.columns
            rows = session.execute(select(*columns).where(table.run_id == run.id, table.round >= first)).mappings()
            history[table.__tablename__] = [
                {key: value.hex() if isinstance(value, bytes) else value for key, value in row.items()} for row in rows
            ]
    return history


def _reset(change: Change, to: int, checkpoint: Collection[CheckpointFragmentRow]) -> None:
    run, session = change.run, change.session
    opened = session.get(RoundRow, (run.id, to))
    step = run.step if opened is None else opened.step
    _return_units(change, to)
    for table, first in _later_than(to):
        session.execute(delete(table).where(table.run_id == run.id, table.round >= first))
    for row in checkpoint:
        session.execute(
            update(OuterStateRow)
            .where(OuterStateRow.run_id == run.id, OuterStateRow.fragment == row.fragment)
            .values(round=to, state_digest=row.state_digest)
        )
    if run.ended:
        change.set_state(RunState.PAUSED)
    change.go_back(to, step)


def _return_units(change: Change, to: int) -> None:
    """Return the units of `to` and later rounds to their pools."""
    session = change.session
    note_returned(change, return_since(session, change.run.id, to))
    merge_adjacent(session, change.run.id, to, settled=to)


def note_returned(change: Change, returned: Sequence[Range]) -> None:
    """Subtract consumed units that have returned to their pools from the counters that are checked against the
    units."""
    run, session = change.run, change.session
    for pool in all_pools(session, run):
        own = [(start, stop) for start, stop in returned if pool.first <= start < pool.next]
        tokens = sum(stop - start for start, stop in own) * run.unit_tokens(pool.worker)
        pool.row.tokens -= tokens
        if pool.worker is not None:
            change.row.tokens -= tokens
        if own and pool.units is not None:
            pool.row.checked_epochs = min(pool.row.checked_epochs, (own[0][0] - pool.first) // pool.units)


def _end_leases_and_ban(change: Change, without: Collection[str]) -> None:
    """End all leases, because the workers hold states of rounds that are deleted. Ban the workers `without`."""
    run, session = change.run, change.session
    rows = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id)).all()
    if unknown := set(without) - {row.name for row in rows}:
        raise Problem("not-found", f"the run {run.name} never had a worker {min(unknown)}")
    for row in rows:
        if row.name in without:
            row.state = WorkerState.BANNED
        elif row.state == WorkerState.LIVE:
            row.state = WorkerState.LOST
        row.token_hash = None
        change.after_commit(partial(run.members.leave, row.name))


def _record(change: Change, to: int, prefix: str, without: Collection[str], who: str) -> None:
    run = change.run
    names = sorted(without)
    banned = f"; banned: {', '.join(names)}" if names else ""
    message = (
        f"{who} rolled the run back from state {run.round} to state {to}{banned}. The files of later rounds "
        f"are in {prefix}, and every worker joins again"
    )
    change.record("rolled-back", message, round=to, from_round=run.round, place=prefix, without=names, by=who)
    change.row.rolled_back = {"round": to, "from_round": run.round, "place": prefix, "redone": run.redone}
    guard.note_roll_back(change, to, by_guard=who == guard.GUARD)
    change.wake()


# --- files that are newer than the database ---------------------------------------------------------------------------


def set_aside_newer(run: LiveRun) -> None:
    """Move the blobs of rounds that the database does not have to `set-aside/`, and record it as an event."""
    # Unless a backup was restored, no blob belongs to a later round than the run's, because a round is in the database
    # before its blobs.
    names = (name for kind in KINDS for name, _ in run.blobs.list(run.names.kind(kind)))
    newer = [name for name in names if round_of(name) > run.round]
    if not newer:
        return
    latest = max(map(round_of, newer))
    if (prefix := _prefix_of_rollback(run, latest)) is not None:
        set_aside(run, run.round, prefix)
        return
    prefix = next_prefix(run)
    with run.change() as change:  # before moving: after a crash in between, only this is repeated
        message = (
            f"the database is older than the files (it has {run.round} rounds, but there are files of round {latest}): "
            f"it was restored from a backup. The run continues from round {run.round}; the newer files were moved to "
            f"{prefix}, and every worker joins again"
        )
        change.record("restored-from-backup", message, round=run.round, files_of_round=latest)
        _end_leases(change)
    _move(run, newer, prefix)


def rejoin_if_restored(run: LiveRun) -> None:
    """If the data directory was restored from a backup, make every worker join again, and record it as an event.

    In that case no newer blobs exist that would show the restore, but workers may be ahead of the database.
    """
    if (backup := run.context.data.restored) is None:
        return
    with run.change() as change:
        message = f"{backup} was restored. The run continues from round {run.round}, and every worker joins again"
        change.record("restored-from-backup", message, round=run.round, files_of_round=run.round)
        _end_leases(change)


def _end_leases(change: Change) -> None:
    run = change.run
    live = change.session.scalars(
        select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.state == WorkerState.LIVE)
    ).all()
    for row in live:  # their member tokens belong to a lost history; their names stay reserved
        row.state, row.token_hash = WorkerState.LOST, None
        return_units(change.session, run.id, row.name)


def next_prefix(run: LiveRun) -> str:
    """Return an unused prefix below `set-aside/`."""
    earlier = {
        int(name.removeprefix(run.names.set_aside).split("/")[0]) for name, _ in run.blobs.list(run.names.set_aside)
    }
    return f"{run.names.set_aside}{max(earlier, default=-1) + 1}/"


def set_aside(run: LiveRun, state: int, prefix: str) -> None:
    """Move the blobs that are newer than the run's state `state` to `prefix`: checkpoints of later states, and the
    contributions, deltas and residuals of its round and of later ones."""
    first: dict[Kind, int] = {"checkpoints": state + 1, "contributions": state, "deltas": state, "residuals": state}
    newer = [
        name
        for kind, round_ in first.items()
        for name, _ in run.blobs.list(run.names.kind(kind))
        if round_of(name) >= round_
    ]
    _move(run, newer, prefix)


def _move(run: LiveRun, names: list[str], prefix: str) -> None:
    run.uploads.note_vanished(*names)
    for name in names:
        run.blobs.rename(name, prefix + name.removeprefix(run.names.all))
    note_set_aside(run)


def note_set_aside(run: LiveRun) -> None:
    """Note how many bytes are set aside."""
    run.set_aside_bytes = sum(size for _, size in run.blobs.list(run.names.set_aside))


def _prefix_of_rollback(run: LiveRun, latest: int) -> str | None:
    """Return the prefix of a rollback that a crash has interrupted, so that not all blobs of rounds up to `latest` are
    moved. Return None if there is none: a round was opened since, or the last rollback was a different one."""
    with run.context.database.read() as session:
        last = session.get_one(RunRow, run.id).rolled_back
        if last is None or last["round"] != run.round or latest > last["from_round"]:
            return None
        opened = session.get(RoundRow, (run.id, run.round)) is not None
    return None if opened else last["place"]
