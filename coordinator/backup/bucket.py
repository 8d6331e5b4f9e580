"""Backups of a coordinator whose blobs are in a bucket: copies of its database beside the blobs.

    owner                                the id of the coordinator that the bucket belongs to (store/opening.py)
    database/{owner}/{n}.{digest}.zst    backup n's copy of the database, compressed; the digest is that of the copy
    database/{owner}/{n}.json            backup n's manifest; without it there is no backup n
    runs/…                               the blobs

The blobs are not copied. Instead, a blob stays until no backup needs it. Code that deletes blobs with rows deletes the
rows first, then makes a backup (`RunContext.back_up`), and then deletes only blobs that no remaining backup needs.

No object is overwritten, and the manifest is written last. A restore gives the bucket to a new owner, so a coordinator
that should have been stopped can neither make backups nor delete blobs any more.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard
from sqlalchemy import URL

from coordinator.backup.contents import DamagedBackup, content_of, manifest_of, never_interrupt
from coordinator.backup.create import required_blobs
from coordinator.backup.manifest import Blob, Manifest, encode
from coordinator.store import database
from coordinator.store.blobs import OWNER, OwnedBucket
from protocol import __version__
from protocol.errors import OuterstepError

if TYPE_CHECKING:
    from outerstep.common.objects import Objects, Version

KEPT = 3  # backups, the newest ones
FOLDER = "database"
_MANIFEST = re.compile(r"([1-9][0-9]*)\.json")


class BucketBackups:
    """Makes the backups of one coordinator. Thread-safe."""

    def __init__(self, bucket: OwnedBucket, url: URL, scratch: Callable[[], Path], now: Callable[[], float]) -> None:
        """`url`: of the database. `scratch` returns an unused local path. Reads the manifests of earlier backups; may
        raise OuterstepError."""
        self._bucket, self._url, self._scratch, self._now = bucket, url, scratch, now
        self._folder = StoredBackups(bucket.objects, bucket.owner)
        self._lock = threading.Lock()
        self._kept: dict[int, Manifest] = {}
        numbers = self._folder.numbers()
        self._last: int | None = max(numbers, default=0)  # None: the last backup failed, and may be there all the same
        for number in numbers:
            with suppress(DamagedBackup):
                self._kept[number] = self._folder.manifest(number)

    def __str__(self) -> str:
        return str(self._bucket.objects)

    @property
    def needed(self) -> frozenset[str]:
        """The names of the blobs that the backups need."""
        return frozenset(blob.name for manifest in self._kept.values() for blob in manifest.blobs)

    def last_made_at(self) -> float | None:
        """Return when the newest backup was made, in seconds since 1970; None if there is none."""
        return self._kept[max(self._kept)].made_at if self._kept else None

    def make(self, interrupt: Callable[[], object] = never_interrupt, *, alone: bool = False) -> Manifest:
        """Make a backup, and remove all but the newest KEPT, or with `alone` all others. Durable when this returns.

        Raises StoreOutage if the bucket cannot be written or belongs to another coordinator; OuterstepError if the
        database cannot be copied; and what `interrupt` raises.
        """
        with self._lock:
            self._bucket.check()
            last, self._last = self._last, None
            if last is None:
                with self._bucket.outages():
                    last = max(self._folder.numbers(), default=0)
            made_at, copied, compressed = self._now(), self._scratch(), self._scratch()
            try:
                database.copy(self._url, copied)
                interrupt()
                manifest = self._stored(last + 1, made_at, copied, compressed)
            finally:
                copied.unlink(missing_ok=True)
                compressed.unlink(missing_ok=True)
            self._kept[manifest.number] = manifest
            self._last = manifest.number
            newest = sorted(self._kept, reverse=True)[: 1 if alone else KEPT]
            self._kept = {number: self._kept[number] for number in sorted(newest)}
            self._bucket.check()
            with self._bucket.outages():
                self._folder.remove_all_but(self._kept.values())
            return manifest

    def _stored(self, number: int, made_at: float, copied: Path, compressed: Path) -> Manifest:
        runs, blobs = required_blobs(copied)
        compress(copied, compressed)
        with self._bucket.outages():
            lost = {blob.name for blob in self._folder.missing(blobs)}
            manifest = Manifest(
                number=number,
                made_at=made_at,
                version=__version__,
                runs=runs,
                database=content_of(copied),
                blobs=[blob for blob in blobs if blob.name not in lost],
                lost=sorted(lost),
            )
            self._folder.add(manifest, compressed)
        return manifest


class StoredBackups:
    """The backups of one owner of a bucket. Methods raise OuterstepError if the store fails."""

    def __init__(self, objects: "Objects", owner: str, version: "Version | None" = None) -> None:
        """`version`: of the object `owner`."""
        self.objects, self._folder, self._version = objects, f"{FOLDER}/{owner}", version

    @classmethod
    def of(cls, objects: "Objects") -> "StoredBackups":
        """Return the backups of the bucket's owner. Raises OuterstepError if it has none."""
        found = objects.get(OWNER)
        backups = None if found is None else cls(objects, found[0].decode(errors="replace"), found[1])
        if backups is None or not backups.numbers():
            raise OuterstepError(f"there is no backup in {objects}: a coordinator with --blobs {objects} makes them")
        return backups

    def pass_on(self, manifest: Manifest, owner: str) -> None:
        """Give the bucket and a backup to a new owner. The old one can change nothing from then on.

        Raises OuterstepError if the bucket has got another owner in the meantime.
        """
        new = StoredBackups(self.objects, owner)
        if new._folder == self._folder:  # by an earlier attempt
            return
        self.objects.copy(self._database(manifest), new._database(manifest))
        self.objects.create(new._manifest(manifest.number), encode(manifest))
        assert self._version is not None
        if self.objects.replace(OWNER, owner.encode(), self._version) is None:
            found = self.objects.get(OWNER)
            if found is None or found[0] != owner.encode():  # else only the answer was lost
                raise OuterstepError(f"another restore has taken {self.objects} in the meantime")

    def __str__(self) -> str:
        return str(self.objects)

    def numbers(self) -> list[int]:
        """Return the numbers of the backups, newest first."""
        found = (_MANIFEST.fullmatch(name) for name, _ in self.objects.within(self._folder))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def manifest(self, number: int) -> Manifest:
        """Return the manifest of a backup. Raises DamagedBackup, also if the backup was removed in the meantime."""
        path = self._manifest(number)
        if (found := self.objects.get(path)) is None:
            raise DamagedBackup(f"{self.objects.name(path)} no longer exists")
        return manifest_of(found[0], number)

    def database_name(self, manifest: Manifest) -> str:
        """Return the address of the backup's copy of the database, for messages."""
        return self.objects.name(self._database(manifest))

    def fetch_database(self, manifest: Manifest, target: Path, scratch: Path) -> None:
        """Write the backup's copy of the database to the new file `target`, durably. `scratch`: an unused path. Raises
        DamagedBackup if it is not what the manifest says."""
        try:
            with scratch.open("xb") as file:
                self.objects.download(self._database(manifest), file.write)
            decompress(scratch, target, manifest.database.size)
            whole = content_of(target) == manifest.database
        except (FileNotFoundError, zstandard.ZstdError):
            whole = False
        finally:
            scratch.unlink(missing_ok=True)
        if not whole:
            target.unlink(missing_ok=True)
            raise DamagedBackup(f"{self.database_name(manifest)} is missing or damaged")

    def missing(self, blobs: Iterable[Blob]) -> list[Blob]:
        """Return those of `blobs` that are not there in their size."""
        found = {f"runs/{name}": size for name, size in self.objects.within("runs")}
        return [blob for blob in blobs if found.get(blob.name) != blob.size]

    def add(self, manifest: Manifest, compressed: Path) -> None:
        """Add a backup of the compressed database. Raises OuterstepError if there is another one of its number."""
        self.objects.create_from(self._database(manifest), compressed)
        path, content = self._manifest(manifest.number), encode(manifest)
        if self.objects.create(path, content) is None:
            found = self.objects.get(path)
            if found is None or found[0] != content:  # else only the answer was lost
                raise OuterstepError(
                    f"another coordinator with a copy of this data directory has written {self.objects.name(path)}: "
                    "stop one of them"
                )

    def remove_all_but(self, kept: Iterable[Manifest]) -> None:
        """Remove all earlier backups, those of earlier owners too, and what a killed backup has left. Later ones stay:
        another coordinator of the same database has made them."""
        kept = list(kept)
        names = {name for each in kept for name in (self._manifest(each.number), self._database(each))}
        last = max(each.number for each in kept)
        found = {f"{FOLDER}/{name}" for name, _ in self.objects.within(FOLDER)}
        others = {path for path in found - names if self._number(path) <= last}
        self.objects.delete(sorted(others, key=lambda path: not path.endswith(".json")))  # manifests first

    def _number(self, path: str) -> int:
        """Return the number of a backup from the name of one of its objects; 0 if it is another owner's."""
        number = path.removeprefix(f"{self._folder}/").partition(".")[0]
        return int(number) if number.isdecimal() else 0

    def _manifest(self, number: int) -> str:
        return f"{self._folder}/{number}.json"

    def _database(self, manifest: Manifest) -> str:
        return f"{self._folder}/{manifest.number}.{manifest.database.digest}.zst"


def compress(source: Path, target: Path) -> None:
    """Compress a file into the new file `target`."""
    with source.open("rb") as reading, target.open("xb") as writing:
        zstandard.ZstdCompressor().copy_stream(reading, writing)


def decompress(source: Path, target: Path, size: int) -> None:
    """Decompress a file into the new file `target`, durably. Raises ZstdError, also if it has more than `size`
    bytes."""
    got = 0
    with source.open("rb") as reading, target.open("xb") as writing:
        for piece in zstandard.ZstdDecompressor().read_to_iter(reading):
            got += len(piece)
            if got > size:
                raise zstandard.ZstdError(f"more than {size} bytes")
            writing.write(piece)
        writing.flush()
        os.fsync(writing.fileno())
