"""A directory of backups.

    backups/{n}.json   the manifest of backup n; without it there is no backup n
    backups/{n}.db     its copy of the database
    blobs/{digest}     blobs by their BLAKE3 digest, each once however many backups need it
    incoming/          files being written; the next backup empties it
    lock               locked while a backup is made

Each file is fsynced, renamed, and its directory fsynced, in this order: blobs, database, manifest. So every file that a
manifest names exists, and a kill or a power cut leaves earlier backups unchanged.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.backup.contents import DamagedBackup, copy_whole, manifest_of
from coordinator.backup.manifest import Content, Manifest, encode
from coordinator.store.blobs import FileReader, Reader
from outerstep.common.connections import error_text
from outerstep.common.files import fsync, open_locked, write_new
from protocol.errors import OuterstepError


class BackupDirectory:
    """A directory of backups. Reading needs no lock; writing happens within `locked`. `str(directory)` names it in
    messages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifests, self._blobs, self._incoming = root / "backups", root / "blobs", root / "incoming"
        self._scratch = itertools.count()

    def __str__(self) -> str:
        return str(self.root)

    # --- reading --------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of the backups, newest first."""
        found = self._manifests.glob("*.json")
        return sorted((int(path.stem) for path in found if path.stem.isdecimal()), reverse=True)

    def manifest(self, number: int) -> Manifest:
        """Return the manifest of a backup. Raises DamagedBackup, also if the backup was removed in the meantime."""
        try:
            content = self._manifest(number).read_bytes()
        except OSError as error:
            raise DamagedBackup(error_text(error)) from error
        return manifest_of(content, number)

    def database_name(self, manifest: Manifest) -> str:
        """Return the path of the backup's copy of the database, for messages."""
        return str(self._database(manifest.number))

    def blob_name(self, digest: str) -> str:
        """Return the path of the blob, whether it is stored or not, for messages."""
        return str(self._blob(digest))

    def open_database(self, manifest: Manifest) -> Reader:
        """Open the backup's copy of the database. Raises OSError."""
        return FileReader(self._database(manifest.number))

    def open_blob(self, digest: str) -> Reader:
        """Open a blob. Raises OSError."""
        return FileReader(self._blob(digest))

    # --- writing --------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other backups, and create it if it is missing.

        Raises OuterstepError if another backup is being made there, or if it contains something else.
        """
        if self.root.is_dir() and not self._manifests.is_dir() and any(self.root.iterdir()):
            raise OuterstepError(f"{self.root} has other files than backups: give a new or an empty directory")
        for folder in (self.root, self._manifests, self._blobs, self._incoming):
            if not folder.is_dir():
                folder.mkdir(mode=0o700)  # not its parents: with a disk unmounted, this would fill another disk
                fsync(folder.parent)
        with open_locked(self.root / "lock", f"another backup is being made in {self.root}; wait until it is done"):
            shutil.rmtree(self._incoming)
            self._incoming.mkdir(mode=0o700)
            yield

    def scratch(self) -> Path:
        """Return an unused path, for a database that is being copied."""
        return self._incoming / str(next(self._scratch))

    def holds(self, blob: Content) -> bool:
        """Return True if a blob of this digest and size is stored."""
        try:
            return self._blob(blob.digest).stat().st_size == blob.size
        except FileNotFoundError:
            return False

    def take_blob(self, reader: Reader, digest: str, interrupt: Callable[[], object]) -> bool:
        """Store a blob. If `reader` cannot be read, or its bytes do not have this digest, store nothing and return
        False.

        The blob is durable once `add` has returned. `interrupt` is called now and then, and may raise.
        """
        file = self.scratch()
        if not copy_whole(reader, file, digest, interrupt):
            return False
        file.replace(self._blob(digest))  # `add` makes the new name durable
        return True

    def add(self, manifest: Manifest, database: Path) -> None:
        """Add a backup that consists of stored blobs and the file `database`. The manifest is written last, so a backup
        that has one is complete. Durable when this returns."""
        fsync(self._blobs)
        fsync(database)
        database.replace(self._database(manifest.number))
        fsync(self._manifests)
        file = self.scratch()
        write_new(file, encode(manifest))
        fsync(file)
        file.replace(self._manifest(manifest.number))
        fsync(self._manifests)

    def remove(self, number: int) -> None:
        """Remove a backup, the manifest first. Its blobs are kept."""
        self._manifest(number).unlink()
        fsync(self._manifests)

    def remove_databases_but(self, kept: list[Manifest], unreadable: set[int]) -> None:
        """Remove the database copies of backups that were removed or never finished. The copies of `kept` stay, and
        those of the backups numbered `unreadable`, which have an unreadable manifest."""
        kept_numbers = unreadable.union(manifest.number for manifest in kept)
        for path in self._manifests.glob("*.db"):
            if path.stem.isdecimal() and int(path.stem) not in kept_numbers:
                path.unlink()

    def digests(self) -> list[str]:
        """Return the digests of all stored blobs."""
        return [path.name for path in self._blobs.iterdir() if len(path.name) == 64]

    def remove_blobs(self, digests: list[str]) -> None:
        """Remove blobs."""
        for digest in digests:
            self._blob(digest).unlink()

    def _manifest(self, number: int) -> Path:
        return self._manifests / f"{number}.json"

    def _database(self, number: int) -> Path:
        return self._manifests / f"{number}.db"

    def _blob(self, digest: str) -> Path:
        return self._blobs / digest


def existing(root: Path) -> BackupDirectory:
    """Return the backups in `root`. Raises OuterstepError if there are none."""
    if not root.is_dir():
        raise OuterstepError(f"there is no directory {root}: give the one that `outerstep coordinator backup` wrote to")
    found = BackupDirectory(root)
    if not found.numbers():
        raise OuterstepError(f"there is no backup in {root}: `outerstep coordinator backup {root}` makes one")
    return found


def check_apart(root: Path, data_dir: Path) -> None:
    """Raise OuterstepError if one directory contains the other, because a failing disk would take both."""
    backups, data = root.resolve(), data_dir.resolve()
    if backups.is_relative_to(data) or data.is_relative_to(backups):
        detail = f"the directory of backups {root} and the data directory {data_dir} overlap"
        raise OuterstepError(f"{detail}: store backups in another directory, preferably on another disk")
