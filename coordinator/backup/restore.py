"""Checking backups, and restoring one: into a new data directory, a bucket, or a PostgreSQL database.

A restore writes the database last, because a coordinator does not start without one: after the blobs, or after the
bucket that has them was given to the new one. The file `restored` is written at the beginning. Without a
database it marks a restore that did not finish: no coordinator starts there, and the next restore begins again. With a
database it makes the coordinator end all leases (`upkeep/rolling_back.py`), because workers may be ahead of the backup.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from sqlalchemy import URL, create_engine, select, update

from coordinator import lease
from coordinator.backup.bucket import StoredBackups
from coordinator.backup.contents import DamagedBackup, copy_whole, is_whole
from coordinator.backup.create import os_errors_explained
from coordinator.backup.directory import BackupDirectory
from coordinator.backup.manifest import Blob, Content, Frozen, Manifest, RunSummary
from coordinator.store import postgresql, sqlite
from coordinator.store.blobs import Blobs, OwnedBucket, Reader
from coordinator.store.data_directory import RESTORED, DataDirectory
from coordinator.store.database import Database
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.opening import FileMark, objects_at, usable
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
from outerstep.common.connections import error_text
from outerstep.common.files import fsync, write_new
from protocol.errors import OuterstepError

# Entries that a directory may have and still count as empty. A restore that was killed at once leaves the first two;
# the last one is in a disk's root.
_IGNORED = {"lock", "incoming", "lost+found"}


# --- checking ---------------------------------------------------------------------------------------------------------


class BackupInfo(Frozen):
    """A backup as it is listed. `damage`: what is wrong with it; empty for a whole one. `lost`: the number of blobs
    that the coordinator itself had lost when the backup was made."""

    number: int
    made_at: float | None  # seconds since 1970; this and the next two are None if the manifest cannot be read
    runs: list[RunSummary]
    bytes: int | None
    blobs: int
    lost: int
    damage: str


class BackupChecker:
    """Checks backups. Those in a directory by reading every byte; blobs that several share are read once. Those in a
    bucket by reading the database, and by the sizes of the blobs."""

    def __init__(self, backups: BackupDirectory | StoredBackups) -> None:
        self._backups = backups
        self._whole: dict[str, bool] = {}

    def info(self, number: int) -> BackupInfo:
        """Check one backup."""
        try:
            manifest = self._backups.manifest(number)
        except DamagedBackup as damage:
            return BackupInfo(number=number, made_at=None, runs=[], bytes=None, blobs=0, lost=0, damage=str(damage))
        return BackupInfo(
            number=number,
            made_at=manifest.made_at,
            runs=manifest.runs,
            bytes=manifest.bytes,
            blobs=len(manifest.blobs),
            lost=len(manifest.lost),
            damage=self._damage(manifest),
        )

    def infos(self) -> list[BackupInfo]:
        """Check all backups, newest first. Backups that are removed in the meantime are left out."""
        found = [self.info(number) for number in self._backups.numbers()]
        remaining = set(self._backups.numbers())
        return [info for info in found if info.number in remaining]

    def _damage(self, manifest: Manifest) -> str:
        if isinstance(self._backups, StoredBackups):
            return _damage_in_bucket(self._backups, manifest)
        if not is_whole(partial(self._backups.open_database, manifest), manifest.database):
            return f"{self._backups.database_name(manifest)} is missing or damaged"
        damaged = [blob for blob in manifest.blobs if not self._is_whole(self._backups, blob)]
        if not damaged:
            return ""
        name = self._backups.blob_name(damaged[0].digest)
        return f"{name} is missing or damaged ({damaged[0].name}){_and_more(damaged)}"

    def _is_whole(self, backups: BackupDirectory, blob: Content) -> bool:
        if blob.digest not in self._whole:
            self._whole[blob.digest] = is_whole(partial(backups.open_blob, blob.digest), blob)
        return self._whole[blob.digest]


def _damage_in_bucket(backups: StoredBackups, manifest: Manifest) -> str:
    with tempfile.TemporaryDirectory(prefix="outerstep-backup-") as folder:
        try:
            backups.fetch_database(manifest, Path(folder) / "database", Path(folder) / "compressed")
        except DamagedBackup as damage:
            return str(damage)
    return _lacking(backups, manifest)


def _lacking(backups: StoredBackups, manifest: Manifest) -> str:
    """Return which blobs the backup lacks; empty if it has all."""
    missing = backups.missing(manifest.blobs)
    return f"{backups.objects.name(missing[0].name)} is missing{_and_more(missing)}" if missing else ""


def _and_more(blobs: list[Blob]) -> str:
    return f", and {len(blobs) - 1} more" if len(blobs) > 1 else ""


# --- restoring --------------------------------------------------------------------------------------------------------


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
    backups: BackupDirectory | StoredBackups,
    number: int | None,
    target: Target,
    warn: Callable[[str], object] = lambda _: None,
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
    raise OuterstepError(f"every backup in {backups} is damaged: `outerstep coordinator backups` shows how")


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


def _restore(backups: BackupDirectory | StoredBackups, number: int, data: DataDirectory, target: Target) -> Manifest:
    manifest = backups.manifest(number)
    _mark(data, manifest)
    shutil.rmtree(data.root / "runs", ignore_errors=True)  # left by a killed restore, or one of a damaged backup
    file = data.scratch()
    if isinstance(backups, StoredBackups):
        if lacking := _lacking(backups, manifest):
            raise DamagedBackup(lacking)
        backups.fetch_database(manifest, file, data.scratch())
        bucket: tuple[str, str] | None = (_owner_in(data, str(backups)), str(backups))
    else:
        bucket, blobs = _blobs_at(target.bucket, data)
        for blob in manifest.blobs:
            _copy(
                partial(backups.open_blob, blob.digest), backups.blob_name(blob.digest), blob, copied := data.scratch()
            )
            blobs.put(blob.name, copied)
            copied.unlink()
        _copy(partial(backups.open_database, manifest), backups.database_name(manifest), manifest.database, file)
    if target.database is not None and bucket is not None:
        _fill(file, target.database, *bucket)
    if isinstance(backups, StoredBackups) and bucket is not None:
        backups.pass_on(manifest, bucket[0])
    if target.database is None:
        file.replace(data.root / sqlite.FILE)
        fsync(data.root)
    else:
        FileMark(data.root).clear()  # the database names the bucket
    return manifest


def _blobs_at(url: str | None, data: DataDirectory) -> tuple[tuple[str, str] | None, Blobs]:
    """Return the owner and the URL of the bucket, and the store of blobs; (None, the store in the data directory) if
    `url` is None. Raises OuterstepError if the bucket cannot be used or belongs to another coordinator."""
    if url is None:
        if FileMark(data.root).read() is not None:  # of an earlier attempt
            FileMark(data.root).clear()
        return None, DirectoryBlobs(data)
    objects = objects_at(url)
    usable(objects)
    owner = _owner_in(data, str(objects))
    if (owned := OwnedBucket.taken(objects, owner)) is None:
        raise OuterstepError(f"the bucket {objects} belongs to another coordinator: give another prefix")
    from coordinator.store.object_blobs import ObjectBlobs

    return (owner, str(objects)), ObjectBlobs(owned, data, cache_bytes=0)


def _owner_in(data: DataDirectory, url: str) -> str:
    """Return the id of the bucket's new owner, which is the same in each attempt to restore."""
    marked = FileMark(data.root).read()
    owner = secrets.token_hex(16) if marked is None else marked[0]
    FileMark(data.root).write(owner, url)
    return owner


def _mark(data: DataDirectory, manifest: Manifest) -> None:
    made_at = datetime.fromtimestamp(manifest.made_at, UTC)
    file = data.scratch()
    write_new(file, f"backup {manifest.number} of {made_at:%Y-%m-%d %H:%M:%S} UTC\n".encode())
    fsync(file)
    file.replace(data.root / RESTORED)
    fsync(data.root)


def _copy(opened: Callable[[], Reader], name: str, content: Content, file: Path) -> None:
    """Write the new file, durably. Raises DamagedBackup if the backup does not have the content."""
    try:
        reader = opened()
    except OSError as error:
        raise DamagedBackup(error_text(error)) from error
    with reader:
        if not copy_whole(reader, file, content.digest):
            raise DamagedBackup(f"{name} is damaged")


# --- into PostgreSQL --------------------------------------------------------------------------------------------------

# The rows of a single database, which are not copied: who shares it, who leads, and which bucket it has.
_OWN = {row.__tablename__ for row in (CoordinatorRow, AggregatorRow, TaskRow, LeaderRow, DeploymentRow)}


def _fill(copied: Path, url: URL, owner: str, bucket: str) -> None:
    """Copy the rows of a SQLite database into the PostgreSQL database at `url`, in one transaction, and let it have the
    bucket. If an earlier attempt has done so, do it again, unless a coordinator has led there since.

    Raises OuterstepError if the database is in use or cannot be written.
    """
    source = URL.create("sqlite", database=str(copied))
    for each in (source, url):
        Database(each).close()  # migrated
    engine = create_engine(source)
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
