"""Moving the database of a stopped coordinator from SQLite to PostgreSQL, or back. The blobs are in a bucket, and stay
there.

The rows are copied in one transaction, read back, and compared by digest. Then the bucket gets the new database's id as
its owner, which is the move: before that the old database is complete, after it the new one, and a coordinator on the
other one does not start, because the bucket is not its own. Last the old SQLite file gets another name.

The file `moving-database` in the data directory makes the move resumable. It names the new database and its id. If the
bucket has the old owner still, a copy with that id is discarded and made again, because the coordinator may have run
since.
"""

import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3
from sqlalchemy import URL, Connection, Table, create_engine, select, update

from coordinator import lease
from coordinator.store import postgresql, sqlite
from coordinator.store.blobs import OWNER
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.store.opening import FileMark, objects_at
from coordinator.store.tables import (
    AggregatorRow,
    Base,
    CoordinatorRow,
    DeploymentRow,
    LeaderRow,
    RunRow,
    TaskRow,
    TokenRow,
)
from outerstep.common.files import fsync, replace_file
from protocol.errors import OuterstepError

JOURNAL = "moving-database"
# The rows of a single database, which are not copied: who shares it, who leads, and which bucket it has.
_OWN = {row.__tablename__ for row in (CoordinatorRow, AggregatorRow, TaskRow, LeaderRow, DeploymentRow)}


@dataclass(frozen=True)
class _Move:
    """`target`: the new database, without its password. `owner`: its id in the bucket."""

    target: str
    owner: str

    @classmethod
    def begun(cls, data: DataDirectory, target: str) -> "_Move":
        """Return the move in the journal, or a new one. Raises OuterstepError if another one has begun."""
        journal = data.root / JOURNAL
        if not journal.exists():
            new = cls(target, secrets.token_hex(16))
            replace_file(journal, lambda file: file.write(json.dumps(asdict(new)).encode() + b"\n"))
            return new
        found = cls(**json.loads(journal.read_text(encoding="utf-8")))
        if found.target != target:
            raise OuterstepError(
                f"a move of this database to {found.target} has begun: repeat that command to finish it, or delete "
                f"{journal} and the rows in {found.target}"
            )
        return found


def to_postgresql(data_dir: Path, url: URL) -> int:
    """Move the SQLite database of `data_dir` to the PostgreSQL database at `url`, which has no runs yet. Return the
    number of rows.

    Raises OuterstepError: a coordinator runs, the blobs are in the data directory, the new database is in use or cannot
    be written, the rows differ after they were copied, or the bucket belongs to another coordinator.
    """
    with ExitStack() as stack:
        data = stack.enter_context(closing(DataDirectory(data_dir)))
        source, mark = sqlite.url_in(data.root), FileMark(data.root)
        moved = data.root / sqlite.MOVED
        if not sqlite.exists(source) and not ((data.root / JOURNAL).exists() and moved.exists()):
            raise OuterstepError(f"{data_dir} has no database: give another --data")
        marked = mark.read()
        if marked is None and sqlite.exists(source):
            raise OuterstepError(
                f"the blobs of {data_dir} are in its folder runs, where other coordinators do not find them: first "
                "move them to a bucket (outerstep coordinator move s3://BUCKET/PREFIX)"
            )
        move = _Move.begun(data, str(url))
        rows = 0
        if marked is not None and sqlite.exists(source):
            stack.enter_context(sqlite.lock(source))
            Database(url).close()
            if _owner_of(marked[1]) != move.owner:  # else the new database is in use
                rows = _fill(source, url, move.owner, marked[1])
                _pass_bucket_on(marked[1], marked[0], move.owner)
            _retire(data)
        if mark.read() is not None:
            mark.clear()
        (data.root / JOURNAL).unlink()
        fsync(data.root)
        return rows


def to_sqlite(data_dir: Path, url: URL) -> int:
    """Move the PostgreSQL database at `url` to the data directory `data_dir`, which has none. Return the number of
    rows.

    Raises OuterstepError: a coordinator runs, `data_dir` has a database, one of the two cannot be read or written, the
    rows differ after they were copied, or the bucket belongs to another database.
    """
    unused = OuterstepError(f"no coordinator has used the database {url!r} yet")
    if not postgresql.exists(url):
        raise unused
    with closing(DataDirectory(data_dir)) as data, _standing_still(url) as source:
        target = sqlite.url_in(data.root)
        if sqlite.exists(target):
            raise OuterstepError(f"{data_dir} has a database already: give another --data")
        owner, bucket = source.execute(select(DeploymentRow.bucket_owner, DeploymentRow.bucket_url)).one()
        if owner is None or bucket is None:
            raise unused
        move, file = _Move.begun(data, str(target)), data.scratch()
        postgresql.copy(url, file)
        engine = create_engine(URL.create("sqlite", database=str(file)))
        with engine.begin() as copied:
            rows = _check_equal(source, copied)
        engine.dispose()
        FileMark(data.root).write(move.owner, bucket)
        _pass_bucket_on(bucket, owner, move.owner)
        fsync(file)
        file.replace(data.root / sqlite.FILE)
        (data.root / JOURNAL).unlink()
        fsync(data.root)
        return rows


# --- the steps --------------------------------------------------------------------------------------------------------


def _fill(source: URL, url: URL, owner: str, bucket: str) -> int:
    """Copy the rows of the SQLite database `source`, in one transaction. Return how many."""
    engine = create_engine(source)
    try:
        with engine.connect() as read, _standing_still(url) as written:
            if written.execute(select(DeploymentRow.bucket_owner)).scalar_one() == owner:
                for table in reversed(
                    Base.metadata.sorted_tables
                ):  # an earlier attempt; the coordinator may have run since
                    if table.name not in _OWN:
                        written.execute(table.delete())
            for row in (RunRow, TokenRow):
                if written.execute(select(row).limit(1)).first() is not None:
                    raise OuterstepError(
                        f"the database {url!r} is in use already, it has {row.__tablename__}: give another one"
                    )
            postgresql.copy_rows(read, written, _OWN)
            postgresql.advance_sequences(written)
            rows = _check_equal(read, written)
            secret = read.execute(select(DeploymentRow.secret)).scalar_one()
            written.execute(update(DeploymentRow).values(secret=secret, bucket_owner=owner, bucket_url=bucket))
            return rows
    finally:
        engine.dispose()


@contextmanager
def _standing_still(url: URL) -> Iterator[Connection]:
    """Yield a connection to a PostgreSQL database while no coordinator can lead or write. Raises OuterstepError if one
    leads."""
    with postgresql.writing_unhurriedly(url) as connection:
        connection.execute(select(LeaderRow.id).with_for_update())
        leader = lease.read(connection)
        if not leader.is_vacant:
            raise OuterstepError(f"the coordinator at {leader.address} leads: stop all coordinators of {url!r} first")
        yield connection


def _check_equal(source: Connection, target: Connection) -> int:
    """Return the number of rows. Raises OuterstepError unless both databases have the same."""
    count = 0
    for table in Base.metadata.sorted_tables:
        if table.name not in _OWN:
            (rows, before), (_, after) = _digest(source, table), _digest(target, table)
            if before != after:
                raise OuterstepError(f"the table {table.name} has other rows after it was copied: repeat the command")
            count += rows
    return count


def _digest(connection: Connection, table: Table) -> tuple[int, str]:
    """Return the number of rows and their digest, in the order of their keys."""
    count, hashed = 0, blake3()
    query = table.select().order_by(*table.primary_key)
    for row in connection.execute(query, execution_options={"yield_per": 1000}):
        count += 1
        hashed.update(json.dumps(list(row), default=bytes.hex).encode())
        hashed.update(b"\n")
    return count, hashed.hexdigest()


def _pass_bucket_on(bucket: str, old: str, new: str) -> None:
    """Make the new database the bucket's owner."""
    objects = objects_at(bucket)
    found = objects.get(OWNER)
    if found is not None and found[0] == old.encode():
        objects.replace(OWNER, new.encode(), found[1])
        found = objects.get(OWNER)
    if found is None or found[0] != new.encode():
        raise OuterstepError(f"the bucket {bucket} belongs to another coordinator now: it was restored elsewhere")


def _owner_of(bucket: str) -> str | None:
    found = objects_at(bucket).get(OWNER)
    return None if found is None else found[0].decode(errors="replace")


def _retire(data: DataDirectory) -> None:
    """Give the SQLite database another name, as a single file."""
    path = data.root / sqlite.FILE
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    path.replace(data.root / sqlite.MOVED)
    fsync(data.root)
