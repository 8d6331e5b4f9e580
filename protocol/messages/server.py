"""Messages about the coordinator itself: tokens, the audit log, health and status."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from protocol.messages.base import ReplyModel, RequestModel
from protocol.spec.sections import Name


class Scope(StrEnum):
    ADMIN = "admin"
    OPERATOR = "operator"  # may pause, resume, drain and stop runs, and evict, ban, readmit and release workers
    WORKER = "worker"
    VIEWER = "viewer"
    JOIN = "join"  # each box exchanges it for its own worker token


DEFAULT_NAMES = 1  # of a worker token
DEFAULT_USES = 100  # of a join token
JOIN_PREFIX = "ostj_"  # of a join token's secret; tells a worker to exchange it
MAX_TOKEN_S = 100 * 365 * 86_400.0  # the longest lifetime of a token that expires
UseCount = Annotated[int, Field(ge=1, le=1_000_000)]
Secret = Annotated[str, Field(pattern=r"^ost_[A-Za-z0-9_-]{43}$")]
_UNLESS_NULL = Field(exclude_if=lambda value: value is None)


class TokenRequest(RequestModel):
    """A request for a token. `run`: the only run that it is valid for; null: all. `expires_in_s`: seconds until it
    expires; null: never. `names`, of a worker token: the number of names that workers may join under. `uses`, of a join
    token: how often it may be exchanged."""

    scope: Scope
    note: Annotated[str, Field(max_length=200)] = ""
    run: Annotated[Name | None, _UNLESS_NULL] = None
    expires_in_s: Annotated[Annotated[float, Field(gt=0, le=MAX_TOKEN_S)] | None, _UNLESS_NULL] = None
    names: Annotated[UseCount | None, _UNLESS_NULL] = None
    uses: Annotated[UseCount | None, _UNLESS_NULL] = None

    @model_validator(mode="after")
    def _keys_fit_the_scope(self) -> Self:
        if self.names is not None and self.scope is not Scope.WORKER:
            raise ValueError(f"names is for worker tokens; this one has scope {self.scope}")
        if self.uses is not None and self.scope is not Scope.JOIN:
            raise ValueError(f"uses is for join tokens; this one has scope {self.scope}")
        return self


class ExchangeRequest(RequestModel):
    """`token`: the worker token that a join token is exchanged for. The worker generates it, so that an exchange whose
    response was lost can be repeated."""

    token: Secret


class TokenInfo(ReplyModel):
    id: str
    scope: Scope
    note: str
    created_at: float
    run: str | None = None  # the only run that it is valid for; null: all
    worker: str | None = None  # the only name that it may join under, if it came from an exchange
    names: int | None = None  # number of names that workers may join under; null: any number
    uses: int | None = None  # of a join token: how often it may be exchanged
    used: int = 0  # of a join token: how often it was exchanged
    parent: str | None = None  # id of the join token that was exchanged for it
    expires_at: float | None = None
    last_used_at: float | None = None  # accurate to a minute after a restart


class NewToken(TokenInfo):
    token: str  # shown only once


class TokenSelf(ReplyModel):
    """The token that a request was sent with, as its holder may see it: what it allows, and in which run.

    id      its id; for a member token, the id of the token that the worker joined with
    scope   null for a member token
    allows  the scopes whose requests it may send, including its own; none for a member token, which acts as `worker`
    run     the only run that it is valid for; null: all
    worker  the only worker that it is valid for
    """

    id: str | None
    scope: Scope | None
    allows: list[Scope]
    run: str | None
    worker: str | None


class AuditEntry(ReplyModel):
    """One audited act: the id of the token, the address that the request came from, and what was done. A null token is
    the coordinator itself."""

    id: int
    at: float
    token: str | None
    address: str | None
    act: str
    run: str | None
    message: str


class Health(ReplyModel):
    status: str
    version: str
    protocol: int


class Readiness(Health):
    """`last_backup_at`: time of the last successful scheduled backup; null if there is none."""

    last_backup_at: float | None


class Finding(ReplyModel):
    """Something that is wrong. `about`: the type of its notification, or `database`, `files` or `notifications`;
    `run`: null if it is about the server; `remedy`: what to do next."""

    about: str
    run: str | None
    message: str
    remedy: str


class DiskInfo(ReplyModel):
    """A file system. `places`: what the coordinator keeps on it: `data`, `database` or both."""

    places: list[str]
    free_bytes: int
    size_bytes: int


class DatabaseInfo(ReplyModel):
    """`answer_s`: the time of one query. It, `schema_revision` and `size_bytes` are null while the database does not
    answer; `fault` says why."""

    backend: str
    schema_revision: str | None
    size_bytes: int | None
    answer_s: float | None
    fault: str


class BackupInfo(ReplyModel):
    """Scheduled backups. `fault`: why the last one failed; empty if it succeeded."""

    every_s: float
    last_at: float | None
    failed_at: float | None
    fault: str


class ClientsInfo(ReplyModel):
    """Workers that hold a lease, open event streams, and open connections."""

    workers: int
    streams: int
    connections: int


class LoggedError(ReplyModel):
    """The latest occurrence of a warning or error in the log. `count`: how often it was logged since the start."""

    at: float
    level: str
    logger: str
    message: str
    count: int


class CoordinatorInfo(ReplyModel):
    """One of several coordinators that share a database. `address`: where the others reach it; `silent_s`: since it was
    last seen; `store_fault`: why it cannot use the store, empty if it can."""

    id: str
    address: str
    version: str
    leads: bool
    silent_s: float
    store_fault: str


class AggregatorInfo(ReplyModel):
    """An aggregator. `host`: its machine and process, HOST:PID; `silent_s`: since it was last seen."""

    id: str
    host: str
    version: str
    silent_s: float


class NotifiedInfo(ReplyModel):
    """A receiver of notifications. `name`: the part of its URL that is not secret; `sent` and `failed`: notifications
    since the start; `fault`: why the last one failed, empty if it was sent."""

    name: str
    signed: bool
    sent: int
    failed: int
    sent_at: float | None
    failed_at: float | None
    fault: str


class ServerStatus(ReplyModel):
    """The state of the coordinator. `findings`: everything that is wrong; `backup`: null if not configured;
    `notifications`: one for each receiver; `coordinators` and `aggregators`: empty unless several may share the
    database; `tasks_waiting`: for an aggregator; `errors`: newest first."""

    version: str
    protocol: int
    started_at: float
    now: float
    findings: list[Finding]
    disks: list[DiskInfo]
    database: DatabaseInfo
    backup: BackupInfo | None
    notifications: list[NotifiedInfo]
    clients: ClientsInfo
    coordinators: list[CoordinatorInfo]
    aggregators: list[AggregatorInfo]
    tasks_waiting: int
    errors: list[LoggedError]
