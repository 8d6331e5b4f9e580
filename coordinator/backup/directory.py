"""Backups in a directory.

    {n}/                backup n
        outerstep.db    its copy of the database
        manifest.json   the digest of that copy
        runs/…          the blobs that its rows need, by name
    unfinished/         the backup that is being made; if it is killed, the next one continues it
    removed/            the backup that is being deleted
    lock                locked while a backup is made

A blob that the newest backup has is linked from there, because blobs never change; so each backup is complete, and
takes only the room of what is new. The other blobs are copied. (The coordinator's own files are not linked: the
directory should be on another disk, and a file with two names is damaged under both.) Everything is fsynced before the
folder gets its number. So a kill or a power cut leaves no incomplete backup, and the earlier ones unchanged.

First the database is copied, as of one moment, then the blobs. Meanwhile a running coordinator may delete a blob that a
newer checkpoint replaces; it deletes the row before the blob. So if a blob is gone, the database is copied again, and
blobs that were already copied are kept. Usually the newer copy does not need the blob. If it does, the coordinator
itself has lost the blob, and the manifest lists it as lost.

The coordinator holds nothing back for a backup, so a backup that is killed leaves nothing to release. Copying
terminates as long as blobs are copied faster than the run produces them: each pass finds fewer new ones.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL

from coordinator.backup.contents import (
    Blob,
    Content,
    DamagedBackup,
    Manifest,
    blobs_of,
    content_of,
    copy_whole,
    decode,
    encode,
    never_interrupt,
    os_errors_explained,
    required_blobs,
)
from coordinator.store import database, sqlite
from coordinator.store.blobs import Blobs, FileReader, OwnedBucket, Reader
from coordinator.store.data_directory import DataDirectory
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.opening import objects_at, usable
from outerstep.common.connections import error_text
from outerstep.common.files import fsync, open_locked, replace_file
from protocol.errors import OuterstepError

ATTEMPTS = 20
MANIFEST = "manifest.json"
_OTHERS = {"unfinished", "removed", "lock", "lost+found"}


@dataclass(frozen=True)
class BackupSource:
    """What to back up. `database`: its URL. `open_blob`: opens a blob, or raises FileNotFoundError if it is gone."""

    database: URL
    open_blob: Callable[[str], Reader]


class DirectoryBackups:
    """The backups in a directory. `str(backups)` is its path."""

    def __init__(self, root: Path) -> None:
        self.root, self._unfinished, self._removed = root, root / "unfinished", root / "removed"

    def __str__(self) -> str:
        return str(self.root)

    def numbers(self) -> list[int]:
        """Return the numbers of the backups, newest first."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        return sorted((int(path.name) for path in found if path.name.isdecimal()), reverse=True)

    def manifest(self, number: int) -> Manifest:
        """Return the manifest of a backup. Raises DamagedBackup, also if the backup was removed in the meantime."""
        try:
            return decode((self._folder(number) / MANIFEST).read_bytes(), number)
        except OSError as error:
            raise DamagedBackup(error_text(error)) from error

    @contextmanager
    def fetched(
        self, manifest: Manifest, data: DataDirectory, url: str | None
    ) -> Iterator[tuple[Path, tuple[str, str] | None]]:
        """Copy a backup's blobs to the unused bucket at `url`; None: to the data directory. Yield the copy of the
        database, a scratch file, and the owner and the URL of the bucket. Every byte is compared with its digest.

        Raises DamagedBackup, and OuterstepError if the bucket cannot be used or belongs to another coordinator.
        """
        folder, file = self._folder(manifest.number), data.scratch()
        _copy_out(folder / sqlite.FILE, manifest.database, file)
        bucket, blobs = _new_store(url, data)
        for blob in blobs_of(manifest, file):
            _copy_out(folder / blob.name, blob, copied := data.scratch())
            blobs.put(blob.name, copied)
            copied.unlink()
        yield file, bucket

    # --- making them ----------------------------------------------------------------------------------------------

    def make(
        self,
        source: BackupSource,
        keep: int,
        now: Callable[[], float] = time.time,
        interrupt: Callable[[], object] = never_interrupt,
    ) -> Manifest:
        """Make a backup, which is durable when this returns. Then remove all but the newest `keep`.

        `interrupt` is called now and then; an exception that it raises ends the backup. Raises OuterstepError with a
        remedy.
        """
        with os_errors_explained(self.root, self.root), self.locked():
            manifest = self._copied(source, now, interrupt)
            replace_file(self._unfinished / MANIFEST, lambda file: file.write(encode(manifest)), 0o600)
            fsync(self._unfinished / sqlite.FILE)
            for folder, _, _ in os.walk(self._unfinished):
                fsync(Path(folder))
            self._unfinished.rename(self._folder(manifest.number))
            fsync(self.root)
            for number in self.numbers()[keep:]:
                self._folder(number).rename(self._removed)
                fsync(self.root)
                shutil.rmtree(self._removed)
            return manifest

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other backups, and create it if it is missing.

        Raises OuterstepError if another backup is being made there, or if it contains something else.
        """
        found = {path.name for path in self.root.iterdir()} if self.root.is_dir() else set()
        if any(name not in _OTHERS and not name.isdecimal() for name in found):
            raise OuterstepError(f"{self.root} has other files than backups: give a new or an empty directory")
        if not self.root.is_dir():
            self.root.mkdir(mode=0o700)  # not its parents: with a disk unmounted, this would fill another disk
            fsync(self.root.parent)
        with open_locked(self.root / "lock", f"another backup is being made in {self.root}; wait until it is done"):
            shutil.rmtree(self._removed, ignore_errors=True)
            self._unfinished.mkdir(mode=0o700, exist_ok=True)
            yield

    def _copied(self, source: BackupSource, now: Callable[[], float], interrupt: Callable[[], object]) -> Manifest:
        """Copy the database and the blobs that it needs to `unfinished`, and nothing else."""
        gone: set[str] = set()
        for _ in range(ATTEMPTS):
            for path in self._unfinished.iterdir():
                if path.is_file():  # of an earlier attempt
                    path.unlink()
            made_at, copied = now(), self._unfinished / sqlite.FILE
            database.copy(source.database, copied)
            runs, blobs = required_blobs(copied)
            missing = {blob.name for blob in blobs if not self._take(source, blob, interrupt)}
            if missing <= gone:
                self._remove_all_but({blob.name for blob in blobs})
                return Manifest(
                    number=self._last() + 1,
                    made_at=made_at,
                    runs=runs,
                    database=content_of(copied),
                    lost=sorted(missing),
                )
            gone |= missing
        raise OuterstepError(
            f"the database was copied {ATTEMPTS} times, and each time blobs were deleted before they were copied: "
            "back up to a faster disk, or keep more checkpoints in the run's spec"
        )

    def _take(self, source: BackupSource, blob: Blob, interrupt: Callable[[], object]) -> bool:
        """Link or copy a blob to `unfinished`, unless it is there. Return False if it is gone or damaged."""
        interrupt()
        path = self._unfinished / blob.name
        if path.exists():
            return True
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        earlier = self._folder(self._last()) / blob.name
        with suppress(OSError):  # the newest backup does not have it, or the disk allows no links
            if earlier.stat().st_size == blob.size:
                os.link(earlier, path)
                return True
        try:
            reader = source.open_blob(blob.name)
        except FileNotFoundError:
            return False
        copied = self._unfinished / "copied"
        with reader:
            if not copy_whole(reader.read_into, copied, blob, interrupt):
                return False
        copied.rename(path)
        return True

    def _remove_all_but(self, names: set[str]) -> None:
        """Remove the blobs of `unfinished` that only an earlier attempt has needed."""
        for folder, _, files in os.walk(self._unfinished / "runs"):
            for path in (Path(folder, name) for name in files):
                if path.relative_to(self._unfinished).as_posix() not in names:
                    path.unlink()

    def _last(self) -> int:
        return max(self.numbers(), default=0)

    def _folder(self, number: int) -> Path:
        return self.root / str(number)


def existing(root: Path) -> DirectoryBackups:
    """Return the backups in `root`. Raises OuterstepError if there are none."""
    if not root.is_dir():
        raise OuterstepError(f"there is no directory {root}: give the one that `outerstep coordinator backup` wrote to")
    found = DirectoryBackups(root)
    if not found.numbers():
        raise OuterstepError(f"there is no backup in {root}: `outerstep coordinator backup {root}` makes one")
    return found


def check_apart(root: Path, data_dir: Path) -> None:
    """Raise OuterstepError if one directory contains the other, because a failing disk would take both."""
    backups, data = root.resolve(), data_dir.resolve()
    if backups.is_relative_to(data) or data.is_relative_to(backups):
        detail = f"the directory of backups {root} and the data directory {data_dir} overlap"
        raise OuterstepError(f"{detail}: store backups in another directory, preferably on another disk")


def _copy_out(path: Path, content: Content, file: Path) -> None:
    """Copy a file of a backup to the new file `file`, durably. Raises DamagedBackup if it does not have the content."""
    try:
        reader = FileReader(path)
    except OSError as error:
        raise DamagedBackup(error_text(error)) from error
    with reader:
        if not copy_whole(reader.read_into, file, content):
            raise DamagedBackup(f"{path} is damaged")


def _new_store(url: str | None, data: DataDirectory) -> tuple[tuple[str, str] | None, Blobs]:
    """Return the owner and the URL of the bucket, and the store of blobs; (None, the store in the data directory) if
    `url` is None. Raises OuterstepError if the bucket cannot be used or belongs to another coordinator."""
    if url is None:
        return None, DirectoryBlobs(data)
    objects = objects_at(url)
    usable(objects)
    owner = data.claim()
    if (owned := OwnedBucket.taken(objects, owner)) is None:
        raise OuterstepError(f"the bucket {objects} belongs to another coordinator: give another prefix")
    from coordinator.store.object_blobs import ObjectBlobs

    return (owner, str(objects)), ObjectBlobs(owned, data, cache_bytes=0)
