"""The sender of a request, what its token allows, and the audit log of what it did.

The audit log has who did what with a token or changed one, and from which address. An entry is written in the
transaction of its action, so neither exists without the other. Entries are never deleted.
"""

from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.store.database import Database
from coordinator.store.tables import AuditRow
from protocol.messages import AuditEntry, Page, Scope

# The scopes that each scope includes. A join token may also read, so that a box can look at the run before it exchanges
# the token.
ALLOWED: dict[Scope, frozenset[Scope]] = {
    Scope.ADMIN: frozenset({Scope.ADMIN, Scope.OPERATOR, Scope.WORKER, Scope.VIEWER}),
    Scope.OPERATOR: frozenset({Scope.OPERATOR, Scope.VIEWER}),
    Scope.WORKER: frozenset({Scope.WORKER, Scope.VIEWER}),
    Scope.VIEWER: frozenset({Scope.VIEWER}),
    Scope.JOIN: frozenset({Scope.JOIN, Scope.VIEWER}),
}


@dataclass(frozen=True)
class Actor:
    """The author of an action: the id of its token, and the address that the request came from. Both are None if the
    coordinator itself acts."""

    token: str | None = None
    address: str | None = None


@dataclass(frozen=True)
class Identity:
    """The holder of a token, or a member (one worker of one run), which has no scope.

    run       the only run that the token is valid for; None: all runs
    worker    the member's name, or the only name that the token may join under; None: any name
    token     the token's id; for a member, the id of the token that it joined with (None: its name was released since)
    names     the number of names that workers may join under with the token; None: any number
    lineage   the id that rate limits count by: of the join token that was exchanged for this one, or its own
    """

    scope: Scope | None
    run: str | None = None
    worker: str | None = None
    token: str | None = None
    names: int | None = None
    secret_hash: bytes = field(default=b"", repr=False)
    lineage: str | None = None

    def allows(self, scope: Scope, run: str | None = None) -> bool:
        """Return True if the token has this scope for the run (None: for all runs)."""
        return self.scope is not None and scope in ALLOWED[self.scope] and self.run in (None, run)

    @property
    def member(self) -> str | None:
        """The worker's name; None for the holder of a token."""
        return self.worker if self.scope is None else None

    def is_member(self, run: str, worker: str) -> bool:
        """Return True if this is the given worker of the given run."""
        return (self.run, self.member) == (run, worker)


def audit_note(session: Session, now: float, by: Actor, act: str, message: str, run: str | None = None) -> None:
    """Add an entry to the audit log in the transaction of `session`."""
    session.add(AuditRow(at=now, token=by.token, address=by.address, act=act, run=run, message=message))


def audit_entries(database: Database, run: str | None, limit: int, before: int | None) -> Page[AuditEntry]:
    """Return the entries with numbers below `before` (None: all), newest first. `run`: only entries of this run."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(AuditRow.id < before)
    if run is not None:
        query = query.where(AuditRow.run == run)
    with database.read() as session:
        items = [AuditEntry.model_validate(row, from_attributes=True) for row in session.scalars(query)]
    return Page(items=items[:limit], next=str(items[limit - 1].id) if len(items) > limit else None)
