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

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard
from sqlalchemy import URL

from coordinator.backup.contents import (
    Blob,
    DamagedBackup,
    Manifest,
    blobs_of,
    content_of,
    copy_whole,
    decode,
    encode,
    never_interrupt,
    required_blobs,
)
from coordinator.store import database
from coordinator.store.blobs import OWNER, OwnedBucket
from coordinator.store.data_directory import DataDirectory
from protocol.errors import OuterstepError

if TYPE_CHECKING:
    from outerstep.common.objects import Objects, Version

KEPT = 3  # backups, the newest ones
FOLDER = "database"
_MANIFEST = re.compile(r"([1-9][0-9]*)\.json")


class BucketBackups:
    """The backups of one owner of a bucket. `str(backups)` is its URL. Methods raise OuterstepError if the store
    fails."""

    def __init__(self, objects: "Objects", owner: str, version: "Version | None" = None) -> None:
        """`version`: of the object `owner`."""
        self.objects, self._folder, self._version = objects, f"{FOLDER}/{owner}", version

    @classmethod
    def of(cls, objects: "Objects") -> "BucketBackups":
        """Return the backups of the bucket's owner. Raises OuterstepError if it has none."""
        found = objects.get(OWNER)
        backups = None if found is None else cls(objects, found[0].decode(errors="replace"), found[1])
        if backups is None or not backups.numbers():
            raise OuterstepError(f"there is no backup in {objects}: a coordinator with --blobs {objects} makes them")
        return backups

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
        return decode(found[0], number)

    @contextmanager
    def fetched(
        self, manifest: Manifest, data: DataDirectory, url: str | None
    ) -> Iterator[tuple[Path, tuple[str, str] | None]]:
        """Yield a backup's copy of the database, a scratch file, and the owner and the URL of the bucket. The blobs
        stay there, and `url` is None. At the end of the block the bucket belongs to the new owner.

        Raises DamagedBackup if a blob is not there in its size, and OuterstepError if the bucket has got another owner
        in the meantime.
        """
        file = self.fetch_database(manifest, data.scratch)
        if missing := self.missing(blobs_of(manifest, file)):
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DamagedBackup(f"{self.objects.name(missing[0].name)} is missing{more}")
        owner = data.claim()
        yield file, (owner, str(self))
        self.pass_on(manifest, owner)

    def fetch_database(self, manifest: Manifest, scratch: Callable[[], Path]) -> Path:
        """Return a file with the backup's copy of the database. `scratch` returns an unused path. Raises DamagedBackup
        if the copy is not what the manifest says."""
        path, packed, copied = self._database(manifest), scratch(), scratch()
        try:
            with packed.open("xb") as writing:
                self.objects.download(path, writing.write)
            with packed.open("rb") as reading, zstandard.ZstdDecompressor().stream_reader(reading) as unpacked:

                def read_into(memory: memoryview, _: int) -> int:
                    try:
                        return unpacked.readinto(memory)
                    except zstandard.ZstdError as error:
                        raise OSError(str(error)) from error

                whole = copy_whole(read_into, copied, manifest.database)
        except FileNotFoundError:
            whole = False
        finally:
            packed.unlink(missing_ok=True)
        if not whole:
            raise DamagedBackup(f"{self.objects.name(path)} is missing or damaged")
        return copied

    def missing(self, blobs: Iterable[Blob]) -> list[Blob]:
        """Return those of `blobs` that are not there in their size."""
        found = {f"runs/{name}": size for name, size in self.objects.within("runs")}
        return [blob for blob in blobs if found.get(blob.name) != blob.size]

    def pass_on(self, manifest: Manifest, owner: str) -> None:
        """Give the bucket and a backup to a new owner. The old one can change nothing from then on.

        Raises OuterstepError if the bucket has got another owner in the meantime.
        """
        new = BucketBackups(self.objects, owner)
        if new._folder == self._folder:  # by an earlier attempt
            return
        self.objects.copy(self._database(manifest), new._database(manifest))
        self.objects.create(new._manifest(manifest.number), encode(manifest))
        assert self._version is not None
        if self.objects.replace(OWNER, owner.encode(), self._version) is None:
            found = self.objects.get(OWNER)
            if found is None or found[0] != owner.encode():  # else only the answer was lost
                raise OuterstepError(f"another restore has taken {self.objects} in the meantime")

    # --- making them ----------------------------------------------------------------------------------------------

    def add(self, manifest: Manifest, copied: Path, packed: Path) -> None:
        """Add a backup of the copied database. `packed`: an unused path. Raises OuterstepError if there is another one
        of its number."""
        with copied.open("rb") as reading, packed.open("xb") as writing:
            zstandard.ZstdCompressor().copy_stream(reading, writing)
        self.objects.create_from(self._database(manifest), packed)
        path, content = self._manifest(manifest.number), encode(manifest)
        if self.objects.create(path, content) is None:
            found = self.objects.get(path)
            if found is None or found[0] != content:  # else only the answer was lost
                raise OuterstepError(
                    f"another coordinator with a copy of this data directory has written {self.objects.name(path)}: "
                    "stop one of them"
                )

    def keep_newest(self, count: int, last: int) -> list[int]:
        """Remove all backups up to number `last` but the newest `count`, those of earlier owners too, and what a killed
        backup has left. Later ones stay: another coordinator of the same database has made them. Return the numbers of
        those that were kept."""
        kept = [number for number in self.numbers() if number <= last][:count]
        names = (name for name, _ in self.objects.within(FOLDER))
        others = [path for path in (f"{FOLDER}/{name}" for name in names) if self._is_older(path, kept, last)]
        self.objects.delete(sorted(others, key=lambda path: not path.endswith(".json")))  # manifests first
        return kept

    def _is_older(self, path: str, kept: list[int], last: int) -> bool:
        number = path.removeprefix(f"{self._folder}/").partition(".")[0]
        return not number.isdecimal() or (int(number) <= last and int(number) not in kept)

    def _manifest(self, number: int) -> str:
        return f"{self._folder}/{number}.json"

    def _database(self, manifest: Manifest) -> str:
        return f"{self._folder}/{manifest.number}.{manifest.database.digest}.zst"


class BucketBackupMaker:
    """Makes the backups of one coordinator. Thread-safe."""

    def __init__(self, bucket: OwnedBucket, url: URL, scratch: Callable[[], Path], now: Callable[[], float]) -> None:
        """`url`: of the database. `scratch` returns an unused local path."""
        self.backups = BucketBackups(bucket.objects, bucket.owner)
        self._bucket, self._url, self._scratch, self._now = bucket, url, scratch, now
        self._lock = threading.Lock()
        self._last: int | None = None  # None: nothing is known, or the last backup failed and may be there all the same
        self._needed: dict[int, frozenset[str]] = {}  # the names of the blobs that each backup needs

    @property
    def needed(self) -> frozenset[str]:
        """The names of the blobs that the backups need. Known once a backup was made."""
        return frozenset(name for names in self._needed.values() for name in names)

    def make(self, interrupt: Callable[[], object] = never_interrupt, *, alone: bool = False) -> Manifest:
        """Make a backup, and remove all but the newest KEPT, or with `alone` all others. Durable when this returns.

        Raises StoreOutage if the bucket cannot be written or belongs to another coordinator; OuterstepError if the
        database cannot be copied; and what `interrupt` raises.
        """
        with self._lock:
            self._bucket.check()
            last, self._last = self._last, None
            with self._bucket.outages():
                if last is None:
                    last = max(self.backups.numbers(), default=0)
            made_at, copied, packed = self._now(), self._scratch(), self._scratch()
            try:
                database.copy(self._url, copied)
                interrupt()
                runs, blobs = required_blobs(copied)
                with self._bucket.outages():
                    lost = {blob.name for blob in self.backups.missing(blobs)}
                    manifest = Manifest(
                        number=last + 1,
                        made_at=made_at,
                        runs=runs,
                        database=content_of(copied),
                        lost=sorted(lost),
                    )
                    self.backups.add(manifest, copied, packed)
            finally:
                copied.unlink(missing_ok=True)
                packed.unlink(missing_ok=True)
            self._last = manifest.number
            known = self._needed | {manifest.number: frozenset(blob.name for blob in blobs) - lost}
            self._bucket.check()
            with self._bucket.outages():
                kept = self.backups.keep_newest(1 if alone else KEPT, manifest.number)
                self._needed = {each: known[each] if each in known else self._read_needs(each) for each in kept}
            return manifest

    def _read_needs(self, number: int) -> frozenset[str]:
        """Return the names of the blobs that a backup of an earlier process needs; none if it is damaged."""
        try:
            manifest = self.backups.manifest(number)
            copied = self.backups.fetch_database(manifest, self._scratch)
        except DamagedBackup:
            return frozenset()
        try:
            return frozenset(blob.name for blob in blobs_of(manifest, copied))
        finally:
            copied.unlink()
