"""The database: SQLite in WAL mode, every commit fsynced, migrated at start.

Only one process writes, and only by `read()` and `write()`. A write begins IMMEDIATE, so it waits for others before it
has done anything, and it commits when its block ends without an exception.
"""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

import migrations
from coordinator.store.tables import Base

DATABASE_FILE = "outerstep.db"


class Database:
    """The database of one data directory, at the newest schema."""

    def __init__(self, data_dir: Path) -> None:
        self._engine = _engine(data_dir / DATABASE_FILE)
        self._writing = self._engine.execution_options(begin="BEGIN IMMEDIATE")
        _upgrade(self._engine)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session to read in."""
        with Session(self._engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session whose transaction is committed, durably, at the end of the block."""
        with Session(self._writing, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        self._engine.dispose()


def migrate(data_dir: Path) -> None:
    """Bring the database of `data_dir` to the newest schema; make it where there is none."""
    data_dir.mkdir(parents=True, exist_ok=True)
    Database(data_dir).close()


def disk_is_full(error: BaseException) -> bool:
    """Return True if `error` says that the disk is full, of a file or of the database."""
    if isinstance(error, OperationalError):
        return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 60})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # transactions begin where `begin` below says, not where sqlite3 guesses
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine


def _upgrade(engine: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["metadata"] = Base.metadata
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
