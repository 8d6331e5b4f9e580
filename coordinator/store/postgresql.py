"""The PostgreSQL backend: which URLs are allowed, connections and their time limits, what errors mean, and how to copy
a database that is in use.

Writes take turns: there is one connection for them per process, and a coordinator's first statement locks the row of
its fencing token (`coordinator/store/lease.py`). So a transaction that reads before it writes sees nothing change
in between, as with SQLite. Reads see one moment (repeatable read).
"""

import errno
import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from coordinator.store.tables import AggregatorRow, Base, DeploymentRow, TaskRow
from protocol.errors import OuterstepError, Transient
from protocol.messages import Cause

DRIVER = "postgresql+psycopg"
APPLICATION, AGGREGATOR = "outerstep-coordinator", "outerstep-aggregator"  # names of sessions in pg_stat_activity
OLDEST = 14  # the oldest version that PostgreSQL's developers maintain
CONNECT_S = 5
STATEMENT_S, LOCK_S = 30, 10
# A paused coordinator must not hold the lock of its token: another one needs it to take over.
IDLE_S = 3
# A lost machine sends nothing, so the system gives up the connection.
SILENT_S = 10
# A server that hangs keeps its connections. One that runs ends every statement before.
ANSWER_S = STATEMENT_S + 5.0
READERS = 8  # connections for reading; more readers wait for one
_UPGRADES = 0x6F757465  # the number of the advisory lock of migrations
BUSY_S = 10.0  # how long a transaction waits for a connection
LISTEN_S = 0.5  # a bell looks this often whether it is closed

logger = logging.getLogger(__name__)

_EXAMPLE = f"{DRIVER}://USER:PASSWORD@HOST/DATABASE"


def named(url: URL, holder: str, application: str = APPLICATION) -> URL:
    """Return the URL for the sessions of one process. `holder`: its id. By that of a coordinator, another one ends its
    sessions when it takes over (`coordinator/store/lease.py`)."""
    return url.update_query_dict({"application_name": application_of(holder, application)})


def application_of(holder: str, application: str = APPLICATION) -> str:
    """Return the `application_name` of a process's sessions."""
    return f"{application} {holder}"


def check(url: URL) -> None:
    """Raise ValueError unless `url` names a database that the installed driver can open."""
    if url.drivername != DRIVER:
        raise ValueError(f"the driver of PostgreSQL is psycopg: write {_EXAMPLE}")
    if not url.database:
        raise ValueError(f"the URL names no database: write {_EXAMPLE}")
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise ValueError("PostgreSQL needs psycopg: pip install 'outerstep[coordinator,postgresql]'") from error


def exists(url: URL) -> bool:
    """Return True if a coordinator has used the database at `url`. Raises OuterstepError if it cannot be reached."""
    with _opened(url) as engine, engine.connect() as connection:
        return inspect(connection).has_table("alembic_version")


def lock(url: URL) -> AbstractContextManager[object]:
    """Return a context that locks nothing: coordinators may share the database, and one of them leads."""
    return nullcontext()


def engines(url: URL) -> tuple[Engine, Engine]:
    """Return an engine for reading and one for writing. The one for writing has a single connection."""
    return _reading(url, READERS), _engine(url, 1, isolation_level="READ COMMITTED")


def _reading(url: URL, connections: int, answer_s: float = ANSWER_S) -> Engine:
    engine = _engine(url, connections, isolation_level="REPEATABLE READ", answer_s=answer_s)
    return engine.execution_options(postgresql_readonly=True)


def engine_of(url: URL, connections: int = 1) -> Engine:
    """Return an engine in which every statement commits by itself."""
    return _engine(url, connections, isolation_level="AUTOCOMMIT")


class Bell:
    """Calls `rung` when another process of the same database rings (LISTEN and NOTIFY). A ring may be missed, so
    listeners must also poll. Close it at the end."""

    def __init__(self, url: URL, channel: str, rung: Callable[[], object]) -> None:
        self._engine, self._channel, self._rung = engine_of(url), channel, rung
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="bell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                with self._engine.connect() as connection:
                    connection.execute(text(f"LISTEN {self._channel}"))
                    driver: Any = connection.connection.driver_connection
                    while not self._closing.is_set():
                        for _ in driver.notifies(timeout=LISTEN_S, stop_after=1):
                            self._rung()
                    connection.invalidate()
            except (DBAPIError, PoolTimeout, _driver().Error) as error:
                logger.debug("nobody can ring: %s", error)
                self._closing.wait(LISTEN_S)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._engine.dispose()


def ring(connection: Connection, channel: str) -> None:
    """Wake those that wait for `channel`, once the transaction is committed."""
    connection.execute(select(func.pg_notify(channel, "")))


def _engine(url: URL, connections: int, isolation_level: Any, answer_s: float = ANSWER_S) -> Engine:
    """`answer_s`: how long a statement may go without a byte from the server."""
    limits = {
        "statement_timeout": STATEMENT_S,
        "lock_timeout": LOCK_S,
        "idle_in_transaction_session_timeout": IDLE_S,
    }
    arguments = {
        "application_name": APPLICATION,
        "connect_timeout": CONNECT_S,
        "tcp_user_timeout": SILENT_S * 1000,
        "keepalives_idle": SILENT_S,
        "options": " ".join(f"-c {name}={seconds}s" for name, seconds in limits.items()),
    }
    engine = create_engine(
        url,
        connect_args={name: value for name, value in arguments.items() if name not in url.query},
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=BUSY_S,
        isolation_level=isolation_level,
        json_serializer=partial(json.dumps, allow_nan=False),
    )
    event.listen(engine, "connect", _load_sums_as_integers)
    event.listen(engine, "connect", partial(_wait_no_longer, answer_s))
    return engine


def _wait_no_longer(answer_s: float, connection: Any, _: ConnectionPoolEntry) -> None:
    """Let statements fail, and the connection close, once the server has sent nothing for `answer_s` seconds. Neither
    libpq nor psycopg has such a limit."""
    wait = connection.wait

    def limited(steps: Generator[Any, Any, Any], *args: Any, **options: Any) -> Any:
        return wait(_answered(steps, answer_s, connection.close), *args, **options)

    connection.wait = limited


def _answered(
    steps: Generator[Any, Any, Any], answer_s: float, close: Callable[[], object]
) -> Generator[Any, Any, Any]:
    """Do the `steps` of psycopg's protocol: each yields what it waits for, and gets what is ready, or 0 a few times per
    second. Raises OperationalError, after `close`, once nothing was ready for `answer_s` seconds."""
    heard_at = time.monotonic()
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if ready:
                heard_at = time.monotonic()
            elif (silent_s := time.monotonic() - heard_at) > answer_s:
                close()
                raise _driver().OperationalError(f"the server has not answered for {silent_s:.0f} s")
            wanted = steps.send(ready)
    except StopIteration as end:
        return end.value


def _load_sums_as_integers(connection: Any, _: ConnectionPoolEntry) -> None:
    """Return sums of integers as `int`. PostgreSQL's type for them is `numeric`, so that they cannot overflow, and
    psycopg returns that as `Decimal`."""
    from psycopg.adapt import Loader

    class Sum(Loader):
        def load(self, data: Any) -> int:
            return int(bytes(data))

    connection.adapters.register_loader("numeric", Sum)


@contextmanager
def _opened(url: URL) -> Iterator[Engine]:
    """Yield an engine. Raises OuterstepError if the database cannot be reached."""
    engine = engine_of(url)
    try:
        yield engine
    except DBAPIError as error:
        raise unusable(f"the database {url!r}", error) from error
    finally:
        engine.dispose()


def begin_upgrade(connection: Connection) -> None:
    """Keep others from migrating the database until the transaction ends. Raises OuterstepError if the server is older
    than OLDEST."""
    number = int(connection.execute(text("SHOW server_version_num")).scalar_one())
    if number < OLDEST * 10_000:
        raise OuterstepError(f"the server is PostgreSQL {number // 10_000}; Outerstep needs {OLDEST} or newer")
    connection.execute(text(f"SELECT pg_advisory_xact_lock({_UPGRADES})"))


def folder(url: URL) -> Path | None:
    """Return None: the database is a server's."""
    return None


def size_bytes(url: URL) -> int:
    """Return the size of the database in bytes. Raises OSError."""
    try:
        with _opened(url) as engine, engine.connect() as connection:
            return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    except OuterstepError as error:
        raise OSError(str(error)) from error


class Deployment(NamedTuple):
    """What the coordinators of a database have in common (`DeploymentRow`): their secret, and the owner and URL of
    their bucket; None if they have none yet."""

    secret: bytes
    bucket: tuple[str, str] | None


def deployment(connection: Connection) -> Deployment:
    row = DeploymentRow
    secret, owner, url = connection.execute(select(row.secret, row.bucket_owner, row.bucket_url)).one()
    return Deployment(secret, None if owner is None or url is None else (owner, url))


def copy(url: URL, target: Path) -> None:
    """Copy the database, as of one moment, to the new SQLite database `target`, while others read and write it.

    Raises OuterstepError if the database cannot be read; may raise OSError.
    """
    reading = _reading(url, 1, answer_s=math.inf)
    file = create_engine(URL.create("sqlite", database=str(target)))
    try:
        with reading.connect() as source, file.begin() as copied:
            source.execute(text(_UNHURRIED))
            Base.metadata.create_all(copied)
            _VERSIONS.metadata.create_all(copied)
            copied.execute(_VERSIONS.insert(), [dict(row) for row in source.execute(_VERSIONS.select()).mappings()])
            copy_rows(source, copied, {TaskRow.__tablename__, AggregatorRow.__tablename__})
    except DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error):
            if error.orig.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(target)) from error
            raise OuterstepError(f"the copy {target} cannot be written: {first_line(error)}") from error
        raise unusable(f"the database {url!r} cannot be copied", error) from error
    finally:
        for engine in (reading, file):
            engine.dispose()


_UNHURRIED = "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
_ROWS = 1000  # copied at once
# The migrations that the schema has; alembic's own table.
_VERSIONS = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


@contextmanager
def writing_unhurriedly(url: URL) -> Iterator[Connection]:
    """Yield a connection with a transaction that may take any time, and is committed at the end of the block. Raises
    OuterstepError if the database cannot be written."""
    engine = _engine(url, 1, isolation_level="READ COMMITTED", answer_s=math.inf)
    try:
        with engine.begin() as connection:
            connection.execute(text(_UNHURRIED))
            yield connection
    except DBAPIError as error:
        raise unusable(f"the database {url!r} failed", error) from error
    finally:
        engine.dispose()


def copy_rows(source: Connection, target: Connection, left_out: Set[str] = frozenset()) -> None:
    """Copy the rows of all tables into empty ones. `left_out`: names of tables."""
    for table in Base.metadata.sorted_tables:
        if table.name in left_out:
            continue
        found = source.execute(table.select(), execution_options={"yield_per": _ROWS})
        for rows in found.mappings().partitions():
            target.execute(table.insert(), [dict(row) for row in rows])


def advance_sequences(target: Connection) -> None:
    """Let the next number of each numbered column follow the largest one in it."""
    for table in Base.metadata.sorted_tables:
        if (column := table.autoincrement_column) is not None:
            query = text("SELECT pg_get_serial_sequence(:table, :column)")
            name = target.execute(query, {"table": table.name, "column": column.name}).scalar_one()
            largest = target.execute(select(func.max(column))).scalar_one()
            target.execute(select(func.setval(name, (largest or 0) + 1, False)))


def violated(error: IntegrityError) -> str | None:
    """Return the name of the violated constraint; None if the database does not report it."""
    found: str | None = getattr(getattr(error.orig, "diag", None), "constraint_name", None)
    return found


def fault(error: DBAPIError) -> tuple[Cause, str] | None:
    """Return the cause and a message if `error` means that the database or the way to it has failed; None if only a
    statement was wrong, or if the error is another database system's."""
    if type(error.orig).__module__.partition(".")[0] != "psycopg":
        return None
    state: str | None = getattr(error.orig, "sqlstate", None)
    if state is None:  # it comes from the driver, which cannot connect or has lost its connection
        wrong = not isinstance(error.orig, _driver().OperationalError | _driver().InterfaceError)
        return None if wrong else (Cause.STORAGE_UNAVAILABLE, f"the database does not answer: {first_line(error)}")
    if state == "53100":
        return Cause.STORAGE_FULL, "the database's disk is full: uploads are rejected until there is space"
    if state == "25006":
        return Cause.STORAGE_UNAVAILABLE, "the database is read-only, as a standby is"
    if state in _WAITED:
        return Cause.STORAGE_UNAVAILABLE, f"the database took too long: {first_line(error)}"
    if state[:2] in _FAILED or state == "42501":
        return Cause.STORAGE_UNAVAILABLE, f"the database failed: {first_line(error)}"
    return None


def unusable(what: str, error: DBAPIError) -> OuterstepError:
    """Return the error of a command that cannot use the database: Transient if another try may succeed, because the
    server does not answer or has failed. `what`: the beginning of the sentence."""
    message = f"{what}: {first_line(error)}"
    found = fault(error)
    if found is None or found[0] is not Cause.STORAGE_UNAVAILABLE or _refuses(error):
        return OuterstepError(message)
    return Transient(message)


def _refuses(error: DBAPIError) -> bool:
    """Return True if the server has refused the account or has no such database. The driver reports no code for it if
    that happens while it connects, so the English text decides; in another language, another try does no harm."""
    state = getattr(error.orig, "sqlstate", None) or ""
    return state[:2] in ("28", "3D", "42") or any(each in str(error.orig) for each in _REFUSALS)


_REFUSALS = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist")

# Lock and statement timeouts, and the end of a transaction that was idle for too long.
_WAITED = frozenset({"55P03", "57014", "25P03", "25P04"})
# Classes of errors (PostgreSQL, appendix A): connection, authorization, database name, rollback, resources,
# intervention, system, damage.
_FAILED = frozenset({"08", "28", "3D", "40", "53", "57", "58", "XX"})


def _driver() -> Any:
    import psycopg

    return psycopg


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without SQLAlchemy's additions."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().partition("\n")[0]
