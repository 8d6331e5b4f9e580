"""Backups below a prefix of a bucket: s3://, gs:// and az://.

    backups/{n}.json          the manifest of backup n; without it there is no backup n
    backups/{n}.{digest}.db   its copy of the database, by its BLAKE3 digest
    blobs/{digest}            blobs by their BLAKE3 digest, each once however many backups need it
    lock                      names the process that makes a backup, and until when others must wait (bucket_lock.py)

Objects are written in the same order as in a directory: blobs, database, manifest. An object is durable once it exists.
No object is ever overwritten with other bytes: blobs and databases are named by their digest, and a manifest is only
created if it does not exist. So a backup that was suspended and lost its lock to another one does no harm when it
continues: it finds that the lock is lost, and ends.

Blobs are read from the coordinator's store, hashed and sent in one pass. Only the copy of the database needs space on a
local disk, in the system's directory for temporary files (TMPDIR).
"""

import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from coordinator.backup.bucket_lock import PATH as LOCK
from coordinator.backup.bucket_lock import BucketLock, LockLost
from coordinator.backup.manifest import Content, Manifest, encode
from coordinator.backup.store import DamagedBackup, manifest_of
from coordinator.store.blobs import FileReader, Reader, StoreOutage
from coordinator.store.payloads import READ_BYTES
from outerstep.common.connections import error_text
from outerstep.common.objects import Objects
from protocol.errors import OuterstepError

_MANIFEST = re.compile(r"([1-9][0-9]*)\.json")
_DATABASE = re.compile(r"([1-9][0-9]*)\.([0-9a-f]{64})\.db")
_BLOB = re.compile(r"[0-9a-f]{64}")
_REMOVED_AT_ONCE = 1000


class _Corrupt(Exception):
    """The bytes that were read do not have the expected digest."""


class BackupBucket:
    """The backups below a prefix of a bucket, as a `BackupStore`."""

    def __init__(self, url: str, now: Callable[[], float] = time.time) -> None:
        self.disk = Path(tempfile.gettempdir())
        self._objects = Objects(url)
        self._bucket_lock = BucketLock(self._objects, now)
        self._now = now
        self._scratch = itertools.count()
        self._folder = self.disk  # within `locked`: a folder for this backup
        self._blobs: dict[str, int] = {}  # within `locked`: digest -> size of each stored blob

    def __str__(self) -> str:
        return str(self._objects)

    # --- reading --------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        found = (_MANIFEST.fullmatch(name) for name, _ in self._objects.within("backups"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def manifest(self, number: int) -> Manifest:
        if (found := self._objects.get(_manifest(number))) is None:
            raise DamagedBackup(f"{self._objects.name(_manifest(number))} no longer exists")
        return manifest_of(found[0], number)

    def database_name(self, manifest: Manifest) -> str:
        return self._objects.name(_database(manifest))

    def blob_name(self, digest: str) -> str:
        return self._objects.name(_blob(digest))

    def open_database(self, manifest: Manifest) -> Reader:
        return self._objects.open(_database(manifest))

    def open_blob(self, digest: str) -> Reader:
        return self._objects.open(_blob(digest))

    # --- writing --------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        if (found := self._objects.top()) and not found & {"backups", "blobs", LOCK}:
            raise OuterstepError(f"{self} has other objects than backups: give another prefix")
        self._bucket_lock = BucketLock(self._objects, self._now)
        with self._bucket_lock.held(), tempfile.TemporaryDirectory(prefix="outerstep-backup-") as folder:
            self._folder = Path(folder)
            self._blobs = {name: size for name, size in self._objects.within("blobs") if _BLOB.fullmatch(name)}
            yield

    def scratch(self) -> Path:
        return self._folder / str(next(self._scratch))

    def holds(self, blob: Content) -> bool:
        return self._blobs.get(blob.digest) == blob.size

    def take_blob(self, reader: Reader, digest: str, interrupt: Callable[[], object]) -> bool:
        if not self._upload(_blob(digest), reader, digest, interrupt):
            return False
        self._blobs[digest] = reader.size
        return True

    def add(self, manifest: Manifest, database: Path, interrupt: Callable[[], object]) -> None:
        with FileReader(database) as reader:
            if not self._upload(_database(manifest), reader, manifest.database.digest, interrupt):
                raise OuterstepError(f"the disk of {self.disk} returns other bytes than were written: replace it")
        self._bucket_lock.check()
        path, content = _manifest(manifest.number), encode(manifest)
        if self._objects.create(path, content) is None and not self._has(path, content):
            raise OuterstepError(f"another backup has written {self._objects.name(path)}: repeat the command")
        try:
            self._bucket_lock.renew()
        except LockLost:  # the lock's new holder may have removed blobs that the manifest names
            self._objects.delete([path])
            raise

    def remove(self, number: int) -> None:
        self._remove([_manifest(number)])

    def remove_databases_but(self, kept: list[Manifest], unreadable: set[int]) -> None:
        needed = {_database(manifest) for manifest in kept}
        found = [(f"backups/{name}", _DATABASE.fullmatch(name)) for name, _ in self._objects.within("backups")]
        self._remove(
            [path for path, match in found if match and path not in needed and int(match[1]) not in unreadable]
        )

    def digests(self) -> list[str]:
        return list(self._blobs)

    def remove_blobs(self, digests: list[str]) -> None:
        self._remove([_blob(digest) for digest in digests])
        for digest in digests:
            del self._blobs[digest]

    def _remove(self, paths: list[str]) -> None:
        for start in range(0, len(paths), _REMOVED_AT_ONCE):
            self._bucket_lock.check()
            self._objects.delete(paths[start : start + _REMOVED_AT_ONCE])

    def _upload(self, path: str, reader: Reader, digest: str, interrupt: Callable[[], object]) -> bool:
        """Upload what `reader` reads. Return False, and create no object, if the bytes do not have this digest."""

        def pieces() -> Iterator[bytearray]:
            hasher, at = blake3(), 0
            while True:
                interrupt()
                self._bucket_lock.check()
                piece = bytearray(READ_BYTES)  # a new buffer, because the last one may still be uploading
                try:
                    count = reader.read_into(memoryview(piece), at)
                except StoreOutage:
                    raise
                except OSError as error:
                    raise _Corrupt(error_text(error)) from error
                if not count:
                    break
                hasher.update(memoryview(piece)[:count])
                at += count
                yield piece[:count]
            if hasher.hexdigest() != digest:
                raise _Corrupt(path)

        try:
            self._objects.upload(path, reader.size, pieces())
        except _Corrupt:
            return False
        return True

    def _has(self, path: str, content: bytes) -> bool:
        """Return True if the object already has this content: its upload succeeded, and only the answer was lost."""
        found = self._objects.get(path)
        return found is not None and found[0] == content


def existing(url: str) -> BackupBucket:
    """Return the backups at `url`. Raises OuterstepError if there are none."""
    found = BackupBucket(url)
    if not found.numbers():
        raise OuterstepError(f"there is no backup in {found}: `outerstep coordinator backup {found}` makes one")
    return found


def _manifest(number: int) -> str:
    return f"backups/{number}.json"


def _database(manifest: Manifest) -> str:
    return f"backups/{manifest.number}.{manifest.database.digest}.db"


def _blob(digest: str) -> str:
    return f"blobs/{digest}"
