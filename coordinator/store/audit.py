"""The audit log: who did what with a token or changed one, and from which address. An entry is written in the
transaction of its action, so neither exists without the other. Entries are never deleted."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.store.database import Database
from coordinator.store.identity import Actor
from coordinator.store.tables import AuditRow
from protocol.messages import AuditEntry, Page


def note(session: Session, now: float, by: Actor, act: str, message: str, run: str | None = None) -> None:
    """Add an entry in the transaction of `session`."""
    session.add(AuditRow(at=now, token=by.token, address=by.address, act=act, run=run, message=message))


def entries(database: Database, run: str | None, limit: int, before: int | None) -> Page[AuditEntry]:
    """Return the entries with numbers below `before` (None: all), newest first. `run`: only entries of this run."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(AuditRow.id < before)
    if run is not None:
        query = query.where(AuditRow.run == run)
    with database.read() as session:
        items = [AuditEntry.model_validate(row, from_attributes=True) for row in session.scalars(query)]
    return Page(items=items[:limit], next=str(items[limit - 1].id) if len(items) > limit else None)
