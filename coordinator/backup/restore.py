"""Checking backups, and restoring one into a new data directory.

A restore writes the database last, because a coordinator does not start without one: after the blobs, or after the
bucket that has them was given to the new data directory. The file `restored` is written at the beginning. Without a
database it marks a restore that did not finish: no coordinator starts there, and the next restore begins again. With a
database it makes the coordinator end all leases (`upkeep/rolling_back.py`), because workers may be ahead of the backup.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from coordinator.backup.bucket import StoredBackups
from coordinator.backup.contents import DamagedBackup, copy_whole, is_whole
from coordinator.backup.create import os_errors_explained
from coordinator.backup.directory import BackupDirectory
from coordinator.backup.manifest import Blob, Content, Frozen, Manifest, RunSummary
from coordinator.store import sqlite
from coordinator.store.blobs import Reader
from coordinator.store.data_directory import RESTORED, DataDirectory
from coordinator.store.database import Database
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.opening import FileMark
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


def restore(
    backups: BackupDirectory | StoredBackups,
    number: int | None,
    data_dir: Path,
    warn: Callable[[str], object] = lambda _: None,
) -> Manifest:
    """Restore a backup (None: the newest whole one) into `data_dir`. Return its manifest, once every byte is durable
    and has been compared with its digest. Blobs in a bucket stay there: of them the sizes are compared, and the bucket
    then belongs to `data_dir`. `warn` is called with a message for each newer backup that is damaged.

    Raises OuterstepError if there is no such backup, none is whole, or `data_dir` is not empty.
    """
    _check_new(data_dir)
    found = backups.numbers()
    if number is not None and number not in found:
        there = ", ".join(map(str, found))
        raise OuterstepError(f"there is no backup {number} in {backups}; it has {there}")
    with os_errors_explained(data_dir, data_dir):
        for each in found if number is None else [number]:
            try:
                if isinstance(backups, StoredBackups):
                    return _restore_beside(backups, each, data_dir)
                return _restore(backups, each, data_dir)
            except DamagedBackup as damage:
                if number is not None:
                    raise
                warn(f"backup {each} is damaged, trying an older one: {damage}")
    raise OuterstepError(f"every backup in {backups} is damaged: `outerstep coordinator backups` shows how")


def new_admin_token(data_dir: Path, now: Callable[[], float] = time.time) -> Path:
    """Create an admin token in a restored data directory, and return the path of the file with the token. Needed if the
    earlier tokens were lost with the disk. Migrates the database to the newest schema."""
    database, file = Database(sqlite.url_in(data_dir)), data_dir / "admin.token"
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


def _restore(backups: BackupDirectory, number: int, data_dir: Path) -> Manifest:
    manifest = backups.manifest(number)
    data = DataDirectory(data_dir)
    try:
        _mark(data, manifest)
        shutil.rmtree(data.root / "runs", ignore_errors=True)  # left by a killed restore, or one of a damaged backup
        blobs = DirectoryBlobs(data)
        for blob in manifest.blobs:
            file = _copied(partial(backups.open_blob, blob.digest), backups.blob_name(blob.digest), blob, data)
            blobs.put(blob.name, file)
            file.unlink()
        database = partial(backups.open_database, manifest)
        file = _copied(database, backups.database_name(manifest), manifest.database, data)
        file.replace(data.root / sqlite.FILE)
        fsync(data.root)
    finally:
        data.close()
    return manifest


def _restore_beside(backups: StoredBackups, number: int, data_dir: Path) -> Manifest:
    """Restore a backup whose blobs are in a bucket. It may be repeated after a kill at any point: until the database is
    there, only the bucket's owner changes, and the new one has the backup."""
    manifest = backups.manifest(number)
    if lacking := _lacking(backups, manifest):
        raise DamagedBackup(lacking)
    data = DataDirectory(data_dir)
    try:
        _mark(data, manifest)
        shutil.rmtree(data.root / "runs", ignore_errors=True)
        backups.fetch_database(manifest, file := data.scratch(), data.scratch())
        owner = secrets.token_hex(16)
        FileMark(data.root).write(owner, str(backups))
        backups.pass_on(manifest, owner)
        file.replace(data.root / sqlite.FILE)
        fsync(data.root)
    finally:
        data.close()
    return manifest


def _mark(data: DataDirectory, manifest: Manifest) -> None:
    made_at = datetime.fromtimestamp(manifest.made_at, UTC)
    file = data.scratch()
    write_new(file, f"backup {manifest.number} of {made_at:%Y-%m-%d %H:%M:%S} UTC\n".encode())
    fsync(file)
    file.replace(data.root / RESTORED)
    fsync(data.root)


def _copied(opened: Callable[[], Reader], name: str, content: Content, data: DataDirectory) -> Path:
    """Return a durable file with this content. Raises DamagedBackup if the backup does not have the content."""
    file = data.scratch()
    try:
        reader = opened()
    except OSError as error:
        raise DamagedBackup(error_text(error)) from error
    with reader:
        if not copy_whole(reader, file, content.digest):
            raise DamagedBackup(f"{name} is damaged")
    return file
