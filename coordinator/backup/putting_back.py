"""Restoring a backup into a new data directory.

Blobs come first and the database last, as nothing begins without a database. The file `restored` is there from the
start: without a database it says that this is half of a restore, which the next one does again, and no coordinator
starts there; beside one it has the coordinator end all leases (`upkeep/setting_aside.py`), as workers may be ahead.
"""

import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from coordinator.backup.copying import copy_whole
from coordinator.backup.making import in_sentences
from coordinator.backup.manifest import Content, Manifest
from coordinator.backup.place import Damaged, Place
from coordinator.store import sqlite
from coordinator.store.blobs import Reader
from coordinator.store.data_directory import RESTORED, DataDirectory
from coordinator.store.database import Database
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.tokens import Tokens
from outerstep.common.connections import error_text
from outerstep.common.files import fsync, write_new
from protocol.errors import OuterstepError

_NOTHING = {"lock", "incoming", "lost+found"}  # of a restore that was killed at once; of a disk's root


def restore(
    backups: Place, number: int | None, data_dir: Path, tell: Callable[[str], object] = lambda _: None
) -> Manifest:
    """Restore a backup (None: the newest whole one) into `data_dir`; return its manifest, once every byte has been
    compared with its digest and is durable. `tell` is told of newer ones that are damaged.

    Raises OuterstepError: there is no such backup, none is whole, `data_dir` holds something.
    """
    _check_new(data_dir)
    found = backups.numbers()
    if number is not None and number not in found:
        there = ", ".join(map(str, found))
        raise OuterstepError(f"there is no backup {number} in {backups}, but {there}")
    with in_sentences(data_dir, data_dir):
        for each in found if number is None else [number]:
            try:
                return _restore(backups, each, data_dir)
            except Damaged as damage:
                if number is not None:
                    raise
                tell(f"backup {each} is not whole, so an older one is looked for: {damage}")
    raise OuterstepError(f"no backup in {backups} is whole: `outerstep coordinator backups` says what is damaged")


def new_admin_token(data_dir: Path, now: Callable[[], float] = time.time) -> Path:
    """Make an admin token in a restored data directory, and return the file that it is in: who has lost those of before
    with the disk has none. Brings the database to the newest schema."""
    database, file = Database(sqlite.url_in(data_dir)), data_dir / "admin.token"
    try:
        Tokens(database, now).write_admin(file, "made at a restore")
    finally:
        database.close()
    return file


def _check_new(data_dir: Path) -> None:
    """Raise OuterstepError unless `data_dir` is missing, empty, or half of an earlier restore."""
    held = {path.name for path in data_dir.iterdir()} if data_dir.is_dir() else set()
    if sqlite.FILE in held:
        raise OuterstepError(f"{data_dir} has a database already: restore into a new directory")
    if RESTORED not in held and (others := held - _NOTHING):
        raise OuterstepError(f"{data_dir} is not empty, it has {min(others)}: restore into a new directory")


def _restore(backups: Place, number: int, data_dir: Path) -> Manifest:
    manifest = backups.manifest(number)
    data = DataDirectory(data_dir)
    try:
        _mark(data, manifest)
        shutil.rmtree(data.root / "runs", ignore_errors=True)  # of a restore that was killed, or of a damaged backup
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


def _mark(data: DataDirectory, manifest: Manifest) -> None:
    made_at = datetime.fromtimestamp(manifest.made_at, UTC)
    file = data.scratch()
    write_new(file, f"backup {manifest.number} of {made_at:%Y-%m-%d %H:%M:%S} UTC\n".encode())
    fsync(file)
    file.replace(data.root / RESTORED)
    fsync(data.root)


def _copied(opened: Callable[[], Reader], name: str, content: Content, data: DataDirectory) -> Path:
    """Return a durable file with this content. Raises Damaged for a source without it."""
    file = data.scratch()
    try:
        reader = opened()
    except OSError as error:
        raise Damaged(error_text(error)) from error
    with reader:
        if not copy_whole(reader, file, content.digest):
            raise Damaged(f"{name} is damaged")
    return file
