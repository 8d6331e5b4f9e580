"""The lease of the leader: one row of the table `leader`. Its expiry is compared with the database's clock alone. And
the coordinators that share the database, as this one has last seen them."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import URL, Connection, Double, bindparam, delete, insert, or_, select, text, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from coordinator.store import postgresql
from coordinator.store.database import Database
from coordinator.store.identity import Actor, audit_note
from coordinator.store.tables import CoordinatorRow, DeploymentRow, LeaderRow

LEASE_S = 5.0
FRESH_S = 3.0  # a coordinator that was seen within this time is there; it reports every second
SILENT_S = 10.0  # one that was not seen for longer is reported
FORGOTTEN_S = 600.0  # a coordinator or an aggregator that was not seen for this long is no longer listed

_ID = 1  # of the only row
_END_SESSIONS = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name = :name AND datname = current_database() AND usename = current_user "
    "AND pid <> pg_backend_pid()"
)


class database_clock(GenericFunction[float]):  # noqa: N801 - named like the functions of SQLAlchemy
    """The database's clock: seconds since 1970, now and not when the transaction began."""

    type = Double()
    inherit_cache = True


@compiles(database_clock, "postgresql")
def _postgresql_clock(*_: Any, **__: Any) -> str:
    return "EXTRACT(EPOCH FROM clock_timestamp())::float8"


# Every coordinator sends these each second. A statement that is built anew takes ten times as long as one that is not.
_READ = select(
    LeaderRow.token,
    LeaderRow.holder,
    LeaderRow.address,
    LeaderRow.taken_at,
    (LeaderRow.expires_at - database_clock()).label("remaining_s"),
    database_clock().label("now"),
    select(DeploymentRow.secret).scalar_subquery(),
).where(LeaderRow.id == _ID)
_HELD = update(LeaderRow).where(
    LeaderRow.id == _ID, LeaderRow.token == bindparam("held_token"), LeaderRow.holder.is_not(None)
)
_RENEW = _HELD.values(expires_at=database_clock() + bindparam("lease_s"))
_RELEASE = _HELD.values(holder=None, address=None)
_REPORT = (
    update(CoordinatorRow)
    .where(CoordinatorRow.id == bindparam("own_id"))
    .values(
        address=bindparam("own_address"),
        version=bindparam("own_version"),
        seen_at=database_clock(),
        store_fault=bindparam("fault"),
    )
)
_silent_s = database_clock() - CoordinatorRow.seen_at
_PEERS = (
    select(CoordinatorRow.id, CoordinatorRow.address, CoordinatorRow.version, _silent_s, CoordinatorRow.store_fault)
    .where(_silent_s < FORGOTTEN_S)
    .order_by(CoordinatorRow.id)
)


@dataclass(frozen=True)
class Peer:
    """A coordinator. `silent_s`: since it was seen, by the database's clock. `store_fault`: why it cannot use the
    blobs; empty if it can."""

    id: str
    address: str
    version: str
    silent_s: float
    store_fault: str


@dataclass
class Peers:
    """All of them, this one included. The election keeps it up to date; any thread may read it.

    own             the id of this one
    leader          the id of the one that leads; None if none does
    term            the fencing token, which counts takeovers
    superseded      writes of this process that failed because another coordinator led
    store_answer_s  how long the store took to answer the last probe; None if it did not
    """

    own: str
    leader: str | None = None
    term: int = 0
    superseded: int = 0
    store_answer_s: float | None = None
    all: list[Peer] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.leader == self.own

    def troubles(self) -> Iterator[str]:
        """Yield what is wrong with the others, and with this one's way to the store."""
        for peer in self.all:
            name = f"the coordinator at {peer.address}"
            if peer.silent_s > SILENT_S:
                yield f"{name} has not been heard of for {peer.silent_s:.0f} s"
            elif peer.store_fault:
                yield f"{name} cannot use the store: {peer.store_fault}"


@dataclass(frozen=True)
class Leader:
    """The row. `remaining_s`: until the lease expires; negative if it has. `now`: the database's clock. `secret`: the
    deployment's, which changes only together with the token."""

    token: int
    holder: str | None
    address: str | None
    taken_at: float
    remaining_s: float
    now: float
    secret: bytes = field(repr=False)

    @property
    def expires_at(self) -> float:
        """By the database's clock."""
        return self.now + self.remaining_s

    @property
    def is_vacant(self) -> bool:
        return self.holder is None or self.remaining_s <= 0


def read(connection: Connection) -> Leader:
    """Return the row as it is now."""
    return Leader(*connection.execute(_READ).one())


def take(connection: Connection, holder: str, address: str) -> int | None:
    """Take the lease if it has expired or was released, or if it is from an earlier term of `holder`, which must be
    over. Return the new fencing token; None if another one leads.

    A coordinator that was paused in a transaction may hold the lock of the row for as long as it is paused: the
    server's limit for idle transactions does not apply in the middle of a batch of statements. And the server may not
    know yet that a connection is lost. So the sessions of the former holder are ended first.
    """
    is_over = or_(LeaderRow.holder == holder, LeaderRow.expires_at <= database_clock())
    former = connection.execute(select(LeaderRow.holder).where(LeaderRow.id == _ID, is_over)).scalar_one_or_none()
    if former is not None and connection.dialect.name == "postgresql":
        connection.execute(_END_SESSIONS, {"name": postgresql.application_of(former)})
    token: int | None = connection.execute(
        update(LeaderRow)
        .where(LeaderRow.id == _ID, or_(LeaderRow.holder.is_(None), is_over))
        .values(
            token=LeaderRow.token + 1,
            holder=holder,
            address=address,
            taken_at=database_clock(),
            expires_at=database_clock() + LEASE_S,
        )
        .returning(LeaderRow.token)
    ).scalar_one_or_none()
    return token


def renew(connection: Connection, token: int) -> bool:
    """Let the lease last LEASE_S from now. Return False if the token is no longer the newest, or was released."""
    return connection.execute(_RENEW, {"held_token": token, "lease_s": LEASE_S}).rowcount == 1


def release(connection: Connection, token: int) -> None:
    """Give up the lease, so that another coordinator can take it at once."""
    connection.execute(_RELEASE, {"held_token": token})


def rotate_secret(url: URL, now: Callable[[], float]) -> None:
    """Replace the secret in the database at `url`, which is migrated, while coordinators run. Raises OuterstepError if
    it cannot be used, or is SQLite and in use; may raise OSError.

    From the secret are derived the tickets and proofs of requests between coordinators (`leadership/tickets.py`), and
    the signs of sketches (`aggregation/measuring.py`). A term keeps one secret, so that all contributions to a fragment
    are measured with the same signs. So the leader's term ends too: its lease remains, and until it expires, only the
    same coordinator can begin the next term. Other coordinators read the secret together with the lease, and
    aggregators with each task.
    """
    with closing(Database(url)) as database, database.write() as session:
        session.execute(update(LeaderRow).values(token=LeaderRow.token + 1, address=None))
        session.execute(update(DeploymentRow).values(secret=secrets.token_bytes(32)))
        audit_note(session, now(), Actor(), "secret-rotated", "the secret of the coordinators was replaced")


# --- who is there -----------------------------------------------------------------------------------------------------


def report(connection: Connection, id_: str, address: str, version: str, store_fault: str) -> None:
    """Record that the coordinator is alive. It takes the place of an earlier process at its address."""
    own = {"own_id": id_, "own_address": address, "own_version": version, "fault": store_fault}
    found = connection.execute(_REPORT, own)
    if not found.rowcount:
        over = or_(CoordinatorRow.address == address, CoordinatorRow.seen_at < database_clock() - FORGOTTEN_S)
        connection.execute(delete(CoordinatorRow).where(over))
        values = {"id": id_, "address": address, "version": version, "store_fault": store_fault}
        connection.execute(insert(CoordinatorRow).values(seen_at=database_clock(), **values))


def retire(connection: Connection, id_: str) -> None:
    """Remove the coordinator from the list, because it stops."""
    connection.execute(delete(CoordinatorRow).where(CoordinatorRow.id == id_))


def peers(connection: Connection) -> list[Peer]:
    """Return the coordinators that were seen lately, by id."""
    return [Peer(*each) for each in connection.execute(_PEERS)]
