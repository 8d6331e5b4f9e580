"""Restoring a backup: into a new data directory, a bucket, or a PostgreSQL database.

A restore writes the database last, because a coordinator does not start without one: after the blobs, or after the
bucket that has them was given to the new one. The file `restored` is written at the beginning. Without a
database it marks a restore that did not finish: no coordinator starts there, and the next restore begins again. With a
database it makes the coordinator end all leases (`upkeep/rolling_back.py`), because workers may be ahead of the backup.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, create_engine, select, update

from coordinator.backup.contents import DamagedBackup, Manifest, os_errors_explained
from coordinator.store import lease, postgresql, sqlite
from coordinator.store.data_directory import RESTORED, DataDirectory
from coordinator.store.database import Database
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
from coordinator.store.tokens import Tokens
from outerstep.common.files import NEW, fsync, replace_file
from protocol.errors import OuterstepError

# Entries that a directory may have and still count as empty. A restore that was killed at once leaves the first three;
# the last one is in a disk's root.
_IGNORED = {"lock", "incoming", f"{RESTORED}{NEW}", "lost+found"}


class Backups(Protocol):
    """The backups in a directory or a bucket, which `str` names. The methods are documented in `directory.py` and
    `bucket.py`."""

    def numbers(self) -> list[int]: ...

    def manifest(self, number: int) -> Manifest: ...

    def fetched(
        self, manifest: Manifest, data: DataDirectory, url: str | None
    ) -> AbstractContextManager[tuple[Path, tuple[str, str] | None]]: ...


@dataclass(frozen=True)
class Target:
    """Where a backup is restored to: a new data directory.

    bucket      the URL of an unused bucket, which gets the blobs of a backup in a directory. None: the data directory
                gets them. A backup in a bucket leaves them there
    database    an unused PostgreSQL database, which gets the rows; the blobs are in a bucket then. None: the data
                directory gets a SQLite database
    """

    data_dir: Path
    bucket: str | None = None
    database: URL | None = None

    @property
    def database_url(self) -> URL:
        return self.database or sqlite.url_in(self.data_dir)


def restore(
    backups: Backups, number: int | None, target: Target, warn: Callable[[str], object] = lambda _: None
) -> Manifest:
    """Restore a backup (None: the newest whole one). Return its manifest, once every byte is durable and has been
    compared with its digest. Of blobs that stay in their bucket the sizes are compared, and the bucket then belongs to
    the target. A restore that was killed can be repeated. `warn` is called with a message for each newer backup that is
    damaged.

    Raises OuterstepError if there is no such backup, none is whole, or the target is in use.
    """
    data_dir = target.data_dir
    _check_new(data_dir)
    found = backups.numbers()
    if number is not None and number not in found:
        there = ", ".join(map(str, found))
        raise OuterstepError(f"there is no backup {number} in {backups}; it has {there}")
    with os_errors_explained(data_dir, data_dir):
        for each in found if number is None else [number]:
            try:
                with closing(DataDirectory(data_dir)) as data:
                    return _restore(backups, each, data, target)
            except DamagedBackup as damage:
                if number is not None:
                    raise
                warn(f"backup {each} is damaged, trying an older one: {damage}")
    raise OuterstepError(f"every backup in {backups} is damaged")


def new_admin_token(target: Target, now: Callable[[], float] = time.time) -> Path:
    """Create an admin token in a restored database, and return the path of the file with the token. Needed if the
    earlier tokens were lost with the disk. Migrates the database to the newest schema."""
    database, file = Database(target.database_url), target.data_dir / "admin.token"
    try:
        Tokens(database, now).write_admin(file, "made at a restore")
    finally:
        database.close()
    return file


def _check_new(data_dir: Path) -> None:
    """Raise OuterstepError unless `data_dir` is missing, empty, or contains a restore that did not finish."""
    held = {path.name for path in data_dir.iterdir()} if data_dir.is_dir() else set()
    if sqlite.FILE in held:
        raise OuterstepError(f"{data_dir} has a database already: restore into a new directory")
    if RESTORED not in held and (others := held - _IGNORED):
        raise OuterstepError(f"{data_dir} is not empty, it has {min(others)}: restore into a new directory")


def _restore(backups: Backups, number: int, data: DataDirectory, target: Target) -> Manifest:
    manifest = backups.manifest(number)
    made_at = datetime.fromtimestamp(manifest.made_at, UTC)
    mark = f"backup {number} of {made_at:%Y-%m-%d %H:%M:%S} UTC\n"
    replace_file(data.root / RESTORED, lambda file: file.write(mark.encode()))
    shutil.rmtree(data.root / "runs", ignore_errors=True)  # left by a killed restore, or one of a damaged backup
    with backups.fetched(manifest, data, target.bucket) as (file, bucket):
        if target.database is not None:
            assert bucket is not None, "the command checks it"
            _fill(file, target.database, *bucket)
        else:
            with closing(Database(URL.create("sqlite", database=str(file)))) as copied:
                copied.set_bucket(bucket)
    if target.database is None:
        file.replace(data.root / sqlite.FILE)
        fsync(data.root)
    return manifest


# --- into PostgreSQL --------------------------------------------------------------------------------------------------

# The rows of a single database, which are not copied: who shares it, who leads, and which bucket it has.
_OWN = {row.__tablename__ for row in (CoordinatorRow, AggregatorRow, TaskRow, LeaderRow, DeploymentRow)}


def _fill(copied: Path, url: URL, owner: str, bucket: str) -> None:
    """Copy the rows of a SQLite database into the PostgreSQL database at `url`, in one transaction, and let it have the
    bucket. If an earlier attempt has done so, do it again, unless a coordinator has led there since.

    Raises OuterstepError if the database is in use or cannot be written.
    """
    Database(url).close()  # migrated, as the copy is
    engine = create_engine(URL.create("sqlite", database=str(copied)))
    try:
        with engine.connect() as read, postgresql.writing_unhurriedly(url) as written:
            written.execute(select(LeaderRow.id).with_for_update())
            leader = lease.read(written)
            if written.execute(select(DeploymentRow.bucket_owner)).scalar_one() == owner:
                if leader.taken_at:
                    return
                for table in reversed(Base.metadata.sorted_tables):
                    if table.name not in _OWN:
                        written.execute(table.delete())
            has_rows = (written.execute(select(row).limit(1)).first() is not None for row in (RunRow, TokenRow))
            if not leader.is_vacant or any(has_rows):
                raise OuterstepError(f"the database {url!r} is in use already: give another one")
            postgresql.copy_rows(read, written, _OWN)
            postgresql.advance_sequences(written)
            secret = read.execute(select(DeploymentRow.secret)).scalar_one()
            written.execute(update(DeploymentRow).values(secret=secret, bucket_owner=owner, bucket_url=bucket))
    finally:
        engine.dispose()
