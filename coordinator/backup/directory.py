"""The directory of backups.

    backups/{n}.json   the manifest of backup n, which is there once this is
    backups/{n}.db     its copy of the database
    blobs/{digest}     blobs by their BLAKE3 digest: each once, however many backups need it
    incoming/          being written; emptied by the next backup
    lock               held while a backup is made

Files are fsynced, get their name, and their folder is fsynced, in this order: blobs, database, manifest. So a manifest
that is there names files that are, and after a kill or a power cut the backups before are as they were.
"""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.backup.manifest import Content, Manifest, decode, encode
from coordinator.store.files import FileReader, fsync
from coordinator.store.locking import hold
from coordinator.store.payloads import digest_of
from protocol.direct import write_new
from protocol.errors import OuterstepError
from protocol.reaching import in_words


class Damaged(OuterstepError):
    """A backup that is not whole: what is wrong with it."""


class BackupDirectory:
    """A directory of backups, to be read; within `locked`, to be written as well."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifests, self._blobs, self._incoming = root / "backups", root / "blobs", root / "incoming"
        self._scratch = itertools.count()

    # --- reading --------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of the backups, newest first."""
        found = self._manifests.glob("*.json")
        return sorted((int(path.stem) for path in found if path.stem.isdecimal()), reverse=True)

    def manifest(self, number: int) -> Manifest:
        """Return the manifest of a backup. Raises Damaged, also for one that was removed meanwhile."""
        try:
            manifest = decode(self._manifest(number).read_bytes())
        except OSError as error:
            raise Damaged(in_words(error)) from error
        except ValueError as error:
            raise Damaged(str(error)) from error
        if manifest.number != number:
            raise Damaged(f"its manifest is that of backup {manifest.number}")
        return manifest

    def database(self, number: int) -> Path:
        """Return where the copy of the database is."""
        return self._manifests / f"{number}.db"

    def blob(self, digest: str) -> Path:
        """Return where the blob with this digest is, if it is there."""
        return self._blobs / digest

    def holds(self, blob: Content) -> bool:
        """Return True if the blob is there, by its name and size."""
        try:
            return self.blob(blob.digest).stat().st_size == blob.size
        except FileNotFoundError:
            return False

    def blobs(self) -> Iterator[Path]:
        """Yield the files of all blobs."""
        yield from (path for path in self._blobs.iterdir() if len(path.name) == 64)

    # --- writing --------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory where it is missing, and let nobody else write to it meanwhile.

        Raises OuterstepError if another backup is being made there, or if it is a directory of something else.
        """
        if self.root.is_dir() and not self._manifests.is_dir() and any(self.root.iterdir()):
            raise OuterstepError(f"{self.root} has other files than backups: name a new or an empty directory")
        for folder in (self.root, self._manifests, self._blobs, self._incoming):
            if not folder.is_dir():
                folder.mkdir(mode=0o700)  # not its parents: where a disk is not mounted, another would be filled
                fsync(folder.parent)
        with hold(self.root / "lock", f"another backup is being made in {self.root}; wait until it is done"):
            shutil.rmtree(self._incoming)
            self._incoming.mkdir(mode=0o700)
            yield

    def scratch(self) -> Path:
        """Return an unused path for a file that is being written."""
        return self._incoming / str(next(self._scratch))

    def take_blob(self, file: Path, digest: str) -> None:
        """Give a durable file the name of the blob that it is. The name is durable once `add` has returned."""
        file.replace(self.blob(digest))

    def add(self, manifest: Manifest, database: Path) -> None:
        """Make a new backup of the blobs that are there and the file `database`; durable when this returns."""
        fsync(self._blobs)
        fsync(database)
        database.replace(self.database(manifest.number))
        fsync(self._manifests)
        file = self.scratch()
        write_new(file, encode(manifest))
        fsync(file)
        file.replace(self._manifest(manifest.number))
        fsync(self._manifests)

    def remove(self, number: int) -> None:
        """Remove a backup, but for the blobs: first what makes it one."""
        self._manifest(number).unlink()
        fsync(self._manifests)

    def remove_databases_but(self, kept: set[int]) -> None:
        """Remove the copies of databases of no backup in `kept`: of those that were removed or not finished."""
        for path in self._manifests.glob("*.db"):
            if path.stem.isdecimal() and int(path.stem) not in kept:
                path.unlink()

    def _manifest(self, number: int) -> Path:
        return self._manifests / f"{number}.json"


def existing(root: Path) -> BackupDirectory:
    """Return the directory of backups at `root`. Raises OuterstepError if there is none."""
    if not root.is_dir():
        raise OuterstepError(f"there is no directory {root}: name one that `outerstep coordinator backup` was given")
    found = BackupDirectory(root)
    if not found.numbers():
        raise OuterstepError(f"there is no backup in {root}: `outerstep coordinator backup {root}` makes one")
    return found


def is_whole(path: Path, content: Content) -> bool:
    """Return True if the file is there, can be read and has this content."""
    try:
        with FileReader(path) as reader:
            return reader.size == content.size and digest_of(reader).hex() == content.digest
    except OSError:
        return False


def content_of(path: Path) -> Content:
    """Return what the file holds."""
    with FileReader(path) as reader:
        return Content(digest=digest_of(reader).hex(), size=reader.size)


def check_apart(root: Path, data_dir: Path) -> None:
    """Raise OuterstepError if one of the directories is in the other: a disk that takes one would take both."""
    backups, data = root.resolve(), data_dir.resolve()
    if backups.is_relative_to(data) or data.is_relative_to(backups):
        detail = f"the backups at {root} and the data directory {data_dir} are within each other"
        raise OuterstepError(f"{detail}: name a directory for backups that is elsewhere, best on another disk")
