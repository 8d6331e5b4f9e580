"""The SQLite backend: which paths are allowed, pragmas, how transactions begin, what errors mean, and how to copy a
database that is in use.

WAL mode, with every commit fsynced. A write begins IMMEDIATE, so it waits for other writes before it does anything.
"""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from sqlalchemy import URL, Connection, Engine, PrimaryKeyConstraint, UniqueConstraint, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import ConnectionPoolEntry

from coordinator.store.tables import Base
from outerstep.common.files import open_locked
from protocol.errors import OuterstepError
from protocol.messages import Cause

FILE = "outerstep.db"  # in the data directory, unless a URL says otherwise
BUSY_S = 10  # how long a transaction waits for others; those of a coordinator take milliseconds

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
RESTORE = "restore a backup into a new data directory (outerstep coordinator restore)"

DISK_FULL = "the coordinator's disk is full: uploads are rejected until there is space"

_SLASHES = "three slashes before a relative path and four before an absolute one: sqlite:////var/lib/outerstep.db"


def url_in(data_dir: Path) -> URL:
    """Return the URL of the database in `data_dir`."""
    return URL.create("sqlite", database=str(data_dir / FILE))


def check(url: URL) -> None:
    """Raise ValueError unless `url` names a file."""
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ValueError(f"the SQLite driver is Python's own, not {url.get_driver_name()}: write sqlite:///")
    if url.host is not None or url.username is not None:
        raise ValueError(f"a SQLite URL has {_SLASHES}")
    if url.query:
        raise ValueError(f"the coordinator takes no SQLite options, here {', '.join(sorted(url.query))}")
    if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
        raise ValueError(f"a restart would lose a database in memory; give a file, with {_SLASHES}")


def exists(url: URL) -> bool:
    """Return True if there is a database at `url`."""
    return Path(str(url.database)).exists()


def lock(url: URL) -> IO[str]:
    """Lock the database until the returned file is closed. Raises OuterstepError if another process has locked it or if
    it is damaged; may raise OSError.

    SQLite's own locks allow several processes to write in turn. But a coordinator keeps what it wrote in memory, so it
    must be the only process. The lock of the data directory is not enough: two data directories may name the same
    database.
    """
    path = Path(str(url.database)).resolve()
    if not path.parent.is_dir():  # not created here: on an unmounted disk, a new database would replace the real one
        raise FileNotFoundError(errno.ENOENT, "the database's directory does not exist", os.fspath(path.parent))
    refusal = f"the database {path} is in use by another coordinator; stop it, or give each one its own"
    held = open_locked(path.with_name(f"{path.name}.lock"), refusal)
    if (damage := _damage(path)) is not None:
        held.close()
        raise OuterstepError(f"the database {path} cannot be opened: {damage}; it was not changed; {RESTORE}")
    return held


def _damage(path: Path) -> str | None:
    """Return what is wrong with the pages of the database; None if nothing is, or if it cannot be opened at all.
    Reading all of it takes a few seconds for a gigabyte."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error) if error.sqlite_errorcode & 0xFF in _DAMAGED else None
    return None if found == "ok" else f"it is damaged: {' '.join(str(found).split())}"


def engines(url: URL) -> tuple[Engine, Engine]:
    """Return an engine for reading and one for writing, which share a connection pool."""
    engine = create_engine(url, connect_args={"timeout": BUSY_S})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # `begin` below starts transactions, instead of sqlite3
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine, engine.execution_options(begin="BEGIN IMMEDIATE")


def begin_upgrade(connection: Connection) -> None:
    """Do nothing: the database is locked, and every version has what the tables need."""


def folder(url: URL) -> Path | None:
    """Return the directory of the database at `url`."""
    return Path(str(url.database)).resolve().parent


def size_bytes(url: URL) -> int:
    """Return the size of the database file and its write-ahead log, in bytes."""
    path = Path(str(url.database)).resolve()
    wal = path.with_name(f"{path.name}-wal")
    return path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)


def copy(url: URL, target: Path) -> None:
    """Copy the database, as of one moment, to the new file `target`, while others read and write it.

    Raises OuterstepError if the database cannot be read or is damaged; may raise OSError.
    """
    source = Path(str(url.database)).resolve()
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as reading,
            closing(sqlite3.connect(target)) as writing,
        ):
            reading.backup(writing)
            writing.execute("PRAGMA journal_mode = DELETE")  # a single file, without a log beside it
            (found,) = writing.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(target)) from error
        raise OuterstepError(f"the database {source} cannot be copied: {error}") from error
    if found != "ok":
        raise OuterstepError(f"the database {source} is damaged, so it was not copied: {found}")


def violated(error: IntegrityError) -> str | None:
    """Return the name of the violated constraint; None if SQLite does not report it."""
    kind, _, what = str(error.orig).partition(" constraint failed: ")
    if kind == "CHECK":
        return what
    if kind != "UNIQUE":  # SQLite does not name a violated foreign key
        return None
    columns = what.split(", ")
    table = Base.metadata.tables[columns[0].partition(".")[0]]
    keys = [each for each in table.constraints if isinstance(each, (PrimaryKeyConstraint, UniqueConstraint))]
    found = [each for each in (*keys, *table.indexes) if [str(column) for column in each.columns] == columns]
    return str(found[0].name) if found else None


def fault(error: DBAPIError) -> tuple[Cause, str] | None:
    """Return the cause and a message if `error` means that the database or its disk has failed; None if only a
    statement was wrong."""
    match getattr(error.orig, "sqlite_errorcode", 0) & 0xFF:  # the low byte is the primary error code
        case sqlite3.SQLITE_FULL:
            return Cause.STORAGE_FULL, DISK_FULL
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Cause.STORAGE_UNAVAILABLE, "another process has locked the coordinator's database"
        case sqlite3.SQLITE_READONLY:
            return Cause.STORAGE_UNAVAILABLE, "the coordinator's database is read-only"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return Cause.STORAGE_UNAVAILABLE, f"the coordinator's database is damaged ({error.orig}); {RESTORE}"
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN:
            return Cause.STORAGE_UNAVAILABLE, f"the coordinator's database failed: {error.orig}"
    return None
