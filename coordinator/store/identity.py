"""Who sends a request, and what the token that it carries allows."""

from dataclasses import dataclass, field

from protocol.messages import Scope

# What else a scope allows. A join token reads as well, so that a box can look at the run before it exchanges it.
ALLOWED: dict[Scope, frozenset[Scope]] = {
    Scope.ADMIN: frozenset({Scope.ADMIN, Scope.OPERATOR, Scope.WORKER, Scope.VIEWER}),
    Scope.OPERATOR: frozenset({Scope.OPERATOR, Scope.VIEWER}),
    Scope.WORKER: frozenset({Scope.WORKER, Scope.VIEWER}),
    Scope.VIEWER: frozenset({Scope.VIEWER}),
    Scope.JOIN: frozenset({Scope.JOIN, Scope.VIEWER}),
}


@dataclass(frozen=True)
class Actor:
    """Who does something: the id of a token, and the address that the request came from. None of both: the coordinator
    itself."""

    token: str | None = None
    address: str | None = None


@dataclass(frozen=True)
class Identity:
    """The holder of a token, or a member (one worker of one run), who has no scope.

    run       the only run that it is for; None: all
    worker    the member, or the only name that the token joins under; None: any
    token     the token's id, of a member that of the token that it joined with; None: its name was released since
    names     under how many names workers may join with the token; None: any number
    lineage   the id of the join token that the token was exchanged for, else the token's own: limits are shared by it
    """

    scope: Scope | None
    run: str | None = None
    worker: str | None = None
    token: str | None = None
    names: int | None = None
    secret_hash: bytes = field(default=b"", repr=False)
    lineage: str | None = None

    def allows(self, scope: Scope, run: str | None = None) -> bool:
        """Return True if the token has this scope, of the run (None: of all of them)."""
        return self.scope is not None and scope in ALLOWED[self.scope] and self.run in (None, run)

    @property
    def member(self) -> str | None:
        """The name of the worker that this is; None for the holder of a token."""
        return self.worker if self.scope is None else None

    def is_member(self, run: str, worker: str) -> bool:
        """Return True if it is this worker of this run."""
        return (self.run, self.member) == (run, worker)
