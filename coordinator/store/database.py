"""The database at a URL. It is migrated at start.

It is used only through `read()` and `write()`. A write commits, durably, when its block ends without an exception. Only
one process writes the rows of runs: the only one that has the database, or the one that leads (`leadership/`). Each
database system has its own module beside this one, listed in BACKENDS.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

import migrations
from coordinator.store import postgresql, sqlite
from coordinator.store.blobs import StoreOutage
from coordinator.store.data_directory import RESTORED
from coordinator.store.tables import Base, DeploymentRow, LeaderRow
from outerstep.common.files import FULL
from protocol import __version__
from protocol.errors import OuterstepError, Problem, Transient
from protocol.messages import Cause


class Backend(Protocol):
    """The functions that the module of a database system provides."""

    def check(self, url: URL) -> None:
        """Raise ValueError if a coordinator cannot use a database at `url`."""

    def exists(self, url: URL) -> bool:
        """Return True if there is a database at `url`."""

    def lock(self, url: URL) -> AbstractContextManager[object]:
        """Lock the database until the returned context ends. Raises OuterstepError if another process has locked it;
        may raise OSError."""

    def engines(self, url: URL) -> tuple[Engine, Engine]:
        """Return an engine for reading and one for writing, which share a connection pool."""

    def folder(self, url: URL) -> Path | None:
        """Return the local directory of the database at `url`; None if the database is on another machine."""

    def begin_upgrade(self, connection: Connection) -> None:
        """Keep others from migrating the database until the transaction ends. Raises OuterstepError if the database
        system is too old."""

    def size_bytes(self, url: URL) -> int:
        """Return the size of the database in bytes."""

    def copy(self, url: URL, target: Path) -> None:
        """Copy the database, as of one moment, to the new file `target`, which is a SQLite database whatever the source
        is. Raises OuterstepError if the database cannot be read; may raise OSError."""

    def violated(self, error: IntegrityError) -> str | None:
        """Return the name of the violated constraint; None if the database does not report it."""

    def fault(self, error: DBAPIError) -> tuple[Cause, str] | None:
        """Return the cause and a message if `error` means that the database or its disk has failed; None if only a
        statement was wrong."""


BACKENDS: dict[str, Backend] = {"sqlite": sqlite, "postgresql": postgresql}

# The constraints that a request can violate, and the problem that answers it. No client can violate the others, so a
# violation of those is a bug.
VIOLATIONS = {
    "uq_runs_name": ("run-exists", "a run of this name exists; choose another name"),
    "uq_tokens_secret_hash": ("invalid-message", "token: another token has this secret; choose a random one"),
    "uq_workers_token_hash": (
        "invalid-message",
        "body.member_token: another worker has it; choose one for each worker, from a source of secrets",
    ),
}


def url_of(text: str | None, data_dir: Path) -> URL:
    """Return the URL in `text`, or the URL of the database in `data_dir` if `text` is None. Raises ValueError if it
    cannot be used."""
    url = sqlite.url_in(data_dir) if text is None else _elsewhere(text, data_dir)
    restored = (data_dir / RESTORED).exists()
    if not (restored or any((data_dir / "runs").glob("*"))) or exists(url):
        return url
    if restored:
        raise ValueError(f"the restore into {data_dir} is incomplete: run `outerstep coordinator restore` again")
    raise ValueError(
        f"{data_dir} has files of runs, but there is no database at {url!r}: give the URL that the coordinator had "
        "before, restore the database from a backup, or start with an empty data directory"
    )


def _elsewhere(text: str, data_dir: Path) -> URL:
    """Return the URL in `text`. Raises ValueError if it is not a URL, or if `data_dir` has another database."""
    inside = sqlite.url_in(data_dir)
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ValueError("this is not a URL; an example is sqlite:////var/lib/outerstep.db") from error
    name = url.get_backend_name()
    if name not in BACKENDS:
        raise ValueError(f"{name} is not supported: use one of {', '.join(BACKENDS)}, or omit the setting")
    BACKENDS[name].check(url)
    found = Path(str(inside.database))
    if found.exists() and not (name == "sqlite" and found.resolve() == Path(str(url.database)).resolve()):
        raise ValueError(
            f"the data directory already has a database, {found}: stop the coordinator and move it, with the files "
            "whose names begin with its name, or omit the setting"
        )
    return url


class Fence:
    """The fencing token of one term. `lost` is set once the term must end: another coordinator leads, or it is unknown
    whether a commit has happened."""

    def __init__(
        self,
        token: int,
        holder: str,
        is_valid: Callable[[], bool],
        on_lost: Callable[[], object],
        rejected: Callable[[], object] = lambda: None,
    ) -> None:
        """`holder`: the id of this coordinator. `is_valid`: whether the lease of this token has not expired. `on_lost`
        is called once `lost` is set, and `rejected` for each write that fails because of that."""
        self.token, self.holder = token, holder
        self._is_valid, self._on_lost, self.rejected = is_valid, on_lost, rejected
        self.lost = threading.Event()

    def holds(self) -> bool:
        """Return True while this coordinator leads for sure."""
        return not self.lost.is_set() and self._is_valid()

    def check(self, session: Session) -> None:
        """Lock the row of the token until the transaction ends. Raises Problem `superseded` if the term is over. The
        first statement of every write transaction."""
        if self.lost.is_set():
            self.rejected()
            raise superseded()
        newest = session.scalar(select(LeaderRow.token).with_for_update())
        if newest != self.token:
            self.end()
            self.rejected()
            raise superseded()

    def end(self) -> None:
        """End the term: all further writes fail."""
        if not self.lost.is_set():
            self.lost.set()
            self._on_lost()


def superseded() -> Problem:
    return Problem("superseded", "this coordinator no longer leads; another one does, or will soon", retry_after_s=1)


class Database:
    """The database of one coordinator, migrated to the newest schema and locked against other coordinators. `fence`: if
    several coordinators share it.

    Raises OuterstepError if it is in use or cannot be opened; may raise OSError.
    """

    def __init__(self, url: URL, fence: Fence | None = None) -> None:
        backend = BACKENDS[url.get_backend_name()]
        self.name, self.folder = url.get_backend_name(), backend.folder(url)
        self._fence = fence
        self._violated = backend.violated
        self._size_bytes = partial(backend.size_bytes, url)
        with ExitStack() as opened:
            opened.enter_context(backend.lock(url))
            self.reading, self.writing = backend.engines(url)
            opened.callback(self.reading.dispose)
            opened.callback(self.writing.dispose)
            try:
                upgrade(self.writing)
            except DBAPIError as error:
                raise postgresql.unusable(f"the database {url!r} cannot be opened", error) from error
            self._opened = opened.pop_all()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session for reading."""
        with Session(self.reading) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session. Its transaction is committed, durably, at the end of the block.

        Raises the Problem in VIOLATIONS if the block violates one of those constraints, and Problem `superseded` if
        another coordinator leads.
        """
        committing = False
        try:
            with Session(self.writing, expire_on_commit=False) as session, session.begin():
                if self._fence is not None:
                    self._fence.check(session)
                yield session
                session.flush()  # what is wrong with a statement is known before the commit
                committing = True
        except IntegrityError as error:
            if (problem := VIOLATIONS.get(self._violated(error) or "")) is None:
                raise
            raise Problem(*problem) from error
        except DBAPIError as error:
            # The connection was lost, or the server was stopped: it may have committed all the same.
            if committing and self._fence is not None and fault_of(error) is not None:
                self._fence.end()
            raise

    def revision(self) -> str | None:
        """Return the revision of the schema. Raises DBAPIError if the database does not respond."""
        with self.reading.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def size_bytes(self) -> int:
        """Return the size in bytes. Raises OSError."""
        return self._size_bytes()

    def secret(self) -> bytes:
        """Return the secret that all coordinators of this database have."""
        with self.read() as session:
            return postgresql.deployment(session.connection()).secret

    def bucket(self) -> tuple[str, str] | None:
        """Return the id and the URL of the bucket that has the blobs; None if they are in the data directory."""
        with self.read() as session:
            return postgresql.deployment(session.connection()).bucket

    def set_bucket(self, bucket: tuple[str, str] | None) -> None:
        """Record durably which bucket has the blobs: its id and its URL; None: the data directory has them."""
        with self.write() as session:
            row = session.scalars(select(DeploymentRow)).one()
            row.bucket_owner, row.bucket_url = bucket or (None, None)

    def probe(self) -> None:
        """Begin and end a write transaction without changes. Raises DBAPIError if it cannot begin."""
        with self.write() as session:
            session.connection()

    def close(self) -> None:
        self._opened.close()


def copy(url: URL, target: Path) -> None:
    """Copy the database at `url` to the new file `target` (`Backend.copy`)."""
    BACKENDS[url.get_backend_name()].copy(url, target)


def is_shared(url: URL) -> bool:
    """Return True if several coordinators may use the database at `url` together."""
    return url.get_backend_name() == "postgresql"


def exists(url: URL) -> bool:
    """Return True if there is a database at `url`. Raises OuterstepError if it cannot be reached."""
    return BACKENDS[url.get_backend_name()].exists(url)


def bucket_of(url: URL) -> tuple[str, str] | None:
    """Return what `Database.bucket` returns, for a database that a coordinator may be using; None also if there is no
    database at `url`. Raises OuterstepError if it cannot be read."""
    if not exists(url):
        return None
    reading, _ = BACKENDS[url.get_backend_name()].engines(url)
    try:
        with reading.connect() as connection:
            return postgresql.deployment(connection).bucket
    except DBAPIError as error:
        raise postgresql.unusable(f"the database {url!r} cannot be copied", error) from error
    finally:
        reading.dispose()


class Fault(NamedTuple):
    """A cause that makes every write fail, and a message about it. `of_bucket`: the bucket's, not the database's or the
    disk's."""

    cause: Cause
    reason: str
    of_bucket: bool = False


def fault_of(error: BaseException) -> Fault | None:
    """Return the fault of the disk or the database that `error` reports; None for any other error."""
    if isinstance(error, DBAPIError):
        found = (backend.fault(error) for backend in BACKENDS.values())
        return next((Fault(*each) for each in found if each is not None), None)
    if isinstance(error, Problem) and error.slug == "superseded":
        return Fault(Cause.STORAGE_UNAVAILABLE, str(error))
    if isinstance(error, PoolTimeout):
        return Fault(Cause.STORAGE_UNAVAILABLE, "the database is busy with other transactions")
    if isinstance(error, OSError) and error.errno in FULL:
        return Fault(Cause.STORAGE_FULL, sqlite.DISK_FULL)
    if isinstance(error, StoreOutage):
        return Fault(Cause.STORAGE_UNAVAILABLE, str(error), of_bucket=True)
    if isinstance(error, OSError) and (reason := _FAULTS.get(error.errno or 0)) is not None:
        return Fault(Cause.STORAGE_UNAVAILABLE, reason)
    return None


def at_start(error: Exception) -> Exception:
    """Return what a process raises if `error` keeps it from starting: Transient for an outage of the database or the
    bucket, because the next start may succeed, otherwise `error` itself."""
    fault = fault_of(error) if isinstance(error, StoreOutage | DBAPIError) else None
    return error if fault is None else Transient(fault.reason)


_FAULTS = {
    errno.EROFS: "the coordinator's disk is read-only",
    errno.EIO: "the coordinator's disk has errors (input/output error)",
    errno.EMFILE: "the coordinator has too many open files (ulimit -n)",
    errno.ENFILE: "the coordinator's machine has too many open files",
}


def disk_is_full(error: BaseException) -> bool:
    """Return True if `error` reports a full disk, for a file or the database."""
    fault = fault_of(error)
    return fault is not None and fault.cause is Cause.STORAGE_FULL


def check_schema(engine: Engine) -> None:
    """Raise Transient until a coordinator has migrated the database to the newest schema, and OuterstepError if its
    schema is unknown. May raise DBAPIError."""
    script = ScriptDirectory.from_config(_alembic())
    with engine.connect() as connection:
        _refuse_unknown_schema(connection, script)
        found = MigrationContext.configure(connection).get_current_heads()
    if found != tuple(script.get_heads()):
        raise Transient(
            f"no coordinator of version {__version__} has migrated the database {engine.url!r}: start one first"
        )


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["metadata"] = Base.metadata
    return config


def upgrade(engine: Engine) -> None:
    """Migrate the database to the newest schema; create it if there is none. If its schema is unknown, change nothing
    and raise OuterstepError."""
    config = _alembic()
    with engine.connect() as connection:
        BACKENDS[engine.dialect.name].begin_upgrade(connection)
        config.attributes["connection"] = connection
        _refuse_unknown_schema(connection, ScriptDirectory.from_config(config))
        command.upgrade(config, "head")
        connection.commit()


def _refuse_unknown_schema(connection: Connection, script: ScriptDirectory) -> None:
    known = {each.revision for each in script.walk_revisions()}
    for found in MigrationContext.configure(connection).get_current_heads():
        if found not in known:
            raise OuterstepError(
                f"the database {connection.engine.url!r} has schema {found}, which Outerstep {__version__} does not "
                f"know: another build has migrated it, a later one or one from before version 0.1.0. This one knows "
                f"schemas up to {script.get_current_head()} and has changed nothing. Start that build again, or "
                "restore a backup that this one has made (`outerstep coordinator restore`)"
            )
