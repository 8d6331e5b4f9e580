"""Going back to a checkpoint, because what was learned since is spoilt, or because somebody says so.

Afterwards the run is as it was when that state was reached: its round, its place in the schedule, its work units. Rows
and blobs of later rounds are set aside (`setting_aside.py`), the rows as one file of JSON beside the blobs, for whoever
wants to know what happened. Every worker joins again, and is told to recover the state.

One transaction decides. Before it, nothing of the run has changed; after it, a crash leaves blobs that no row knows,
which the next start sets aside or sweeps, and state files that it derives again from the checkpoint.
"""

import json
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from sqlalchemy import delete, select, update

from coordinator.run.live_run import Change, LiveRun
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
from coordinator.units.ledger import merge_adjacent, return_since
from coordinator.units.pools import all_pools
from coordinator.upkeep import setting_aside
from protocol.errors import Problem
from protocol.messages import RollBack, RunState, WorkerState

_BUSY_S = 1.0
_OF_ROUNDS = (RoundRow, FragmentRow, AssignmentRow, ContributionRow, LateContributionRow, ReportRow)
_OF_STATES = (EvaluationRow, CheckpointRow, CheckpointFragmentRow)  # state N is there before round N


def roll_back_if_due(run: LiveRun, *, verifying: Callable[[], bool]) -> None:
    """Go back to the checkpoint that the guard has ordered, unless an operator has changed the run's state since.
    Called at every tick."""
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
    """Make checkpoint `order.to` the run's state. `verifying` tells whether files are being checked;
    with `resume` the run goes on from there, whatever its state was.

    Raises Problem: not-found (no such checkpoint, or it is damaged; no such worker), rolled-back, not-ready (work on
    the run's files is under way).
    """
    to = order.to
    for row in _checkpoint(run, to):
        if not checkpointing.is_intact(run, row):
            raise Problem("not-found", f"fragment {row.fragment} of checkpoint {to} is damaged on disk: choose another")
    with run.lock:
        if run.round < order.from_round:
            detail = f"the run {run.name} is at state {run.round}, and was seen at {order.from_round}"
            raise Problem("rolled-back", f"{detail}: it was rolled back meanwhile")
        rows = _checkpoint(run, to)
        if verifying() or run.outer.any_job_running:
            raise Problem("not-ready", f"files of the run {run.name} are still being worked on", retry_after_s=_BUSY_S)
        place = setting_aside.next_place(run)
        run.blobs.put(f"{place}rows.json", json.dumps(_history(run, to), indent=1).encode())
        run.suspend()
        opening = run.open
        try:
            with run.change() as change:
                _go_back(change, to, rows)
                _let_go(change, order.without)
                _tell(change, to, place, order.without, who)
                change.audit(by, "rolled-back", f"rolled the run back to state {to}")
                if resume:
                    change.set_state(RunState.RUNNING)
            opening = None
            for row in rows:
                outer_state.fetch_checkpoint(run, row)
            setting_aside.set_aside(run, to, place)
            outer_state.restore(run)
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
    """Return the tables that have rows by round, each with the first round that is later than the state."""
    return [(table, state) for table in _OF_ROUNDS] + [(table, state + 1) for table in _OF_STATES]


def _history(run: LiveRun, to: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that are to go, by table."""
    history: dict[str, list[dict[str, Any]]] = {}
    with run.context.database.read() as session:
        for table, first in _later_than(to):
            columns = table.__table__.columns
            rows = session.execute(select(*columns).where(table.run_id == run.id, table.round >= first)).mappings()
            history[table.__tablename__] = [
                {key: value.hex() if isinstance(value, bytes) else value for key, value in row.items()} for row in rows
            ]
    return history


def _go_back(change: Change, to: int, checkpoint: Collection[CheckpointFragmentRow]) -> None:
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
    """Return to their pools the units of `to` and later rounds; the counts that are checked against them follow."""
    run, session = change.run, change.session
    returned = return_since(session, run.id, to)
    for pool in all_pools(session, run):
        own = [(start, stop) for start, stop in returned if pool.first <= start < pool.next]
        tokens = sum(stop - start for start, stop in own) * run.spec.unit_tokens
        pool.row.tokens -= tokens
        if pool.worker is not None:
            change.row.tokens -= tokens
        if own and pool.units is not None:
            pool.row.checked_epochs = min(pool.row.checked_epochs, (own[0][0] - pool.first) // pool.units)
    merge_adjacent(session, run.id, to, settled=to)


def _let_go(change: Change, without: Collection[str]) -> None:
    """End all leases, for what the workers hold is of rounds that are gone; ban some."""
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


def _tell(change: Change, to: int, place: str, without: Collection[str], who: str) -> None:
    run = change.run
    names = sorted(without)
    banned = f"; {', '.join(names)} may not take part any more" if names else ""
    message = (
        f"{who} rolled the run back from state {run.round} to state {to}{banned}. What was of later rounds is in "
        f"{place}, and every worker joins again"
    )
    change.record("rolled-back", message, round=to, from_round=run.round, place=place, without=names, by=who)
    change.row.rolled_back = {"round": to, "from_round": run.round, "place": place}
    guard.note_roll_back(change, to, by_guard=who == guard.GUARD)
    change.wake()
