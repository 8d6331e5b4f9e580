"""Whose a worker's name is: it belongs to the token that joined with it first, also when its lease has ended, until an
operator releases it."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.run.live_run import Change, LiveRun
from coordinator.store.identity import Actor, Identity
from coordinator.store.tables import WorkerRow
from protocol.errors import Problem


def check_free(session: Session, run: LiveRun, worker: str) -> None:
    """Raise Problem `worker-name-owned` where the name belongs to a token, whatever that is."""
    row = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)).one_or_none()
    if row is not None and row.token is not None:
        raise _owned(run, worker)


def claim(change: Change, row: WorkerRow, by: Identity, actor: Actor) -> None:
    """Let the name be the token's. Raises Problem: worker-name-owned, by another token; forbidden, where the token may
    not join under so many names."""
    run = change.run
    if row.token is not None and row.token != by.token:
        raise _owned(run, row.name)
    if by.worker is not None and by.worker != row.name:
        raise Problem(
            "forbidden",
            f"this token is of the worker {by.worker} alone; join under that name, or exchange a join token for this",
        )
    if by.token is None or row.token == by.token:
        return
    if by.names is not None:
        query = select(func.count(func.distinct(WorkerRow.name)))
        others = change.session.scalars(query.where(WorkerRow.token == by.token, WorkerRow.name != row.name)).one()
        if others >= by.names:
            raise Problem(
                "forbidden",
                f"the token {by.token} is for {by.names} {'name' if by.names == 1 else 'names'} of workers, and so "
                "many have joined with it; join under one of those, or have an admin make a token of this box's own: "
                "`outerstep token create --scope join` for many boxes, `--scope worker --names N` for several workers",
            )
    row.token = by.token
    change.audit(actor, "name-claimed", f"the name {row.name} is of the token {by.token} now")


def _owned(run: LiveRun, worker: str) -> Problem:
    return Problem(
        "worker-name-owned",
        f"the name {worker} belongs to another token in the run {run.name}; join with that one, or under another name "
        f"(--name), or have an operator give it away: outerstep run release {run.name} {worker}",
    )
