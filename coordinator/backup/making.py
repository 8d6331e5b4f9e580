"""Making a backup, while the coordinator runs or not.

First the database is copied, as it is at one moment, and then each blob that the rows of that copy need, unless an
earlier backup has it already: a blob never changes. The coordinator goes on meanwhile, and deletes blobs when newer
checkpoints cover them. Its rows go first. So where a blob is gone, the database is copied anew, and the newer copy does
not need it; what was copied stays. If it does need it, the coordinator has lost that blob itself: the manifest says so.

Nothing is held back in the coordinator for this, and a backup that is killed leaves nothing there to be let go of. It
comes to an end where blobs are copied faster than the run makes those that are kept, for each time fewer are new.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL

from coordinator.backup import pruning
from coordinator.backup.copying import go_on
from coordinator.backup.manifest import Blob, Manifest, RunSummary
from coordinator.backup.needed import needed
from coordinator.backup.place import Place, content_of
from coordinator.store import database
from coordinator.store.blobs import FileReader, Reader
from coordinator.store.database import disk_is_full
from outerstep.common.connections import error_text
from protocol import __version__
from protocol.errors import OuterstepError

ATTEMPTS = 20


@dataclass(frozen=True)
class Source:
    """What backups are made of: a database, and `open_blob`, which raises FileNotFoundError for a blob that is gone."""

    database: URL
    open_blob: Callable[[str], Reader]


@dataclass(frozen=True)
class Made:
    """A backup that was made, what was new in it, and the backups that were removed afterwards."""

    manifest: Manifest
    copied_blobs: int
    copied_bytes: int
    removed: list[int]


def files_of(data_dir: Path) -> Callable[[str], Reader]:
    """Return what opens the blobs of a data directory, whoever else uses it."""

    return lambda name: FileReader(data_dir / name)


def make(
    source: Source,
    backups: Place,
    keep: int,
    now: Callable[[], float] = time.time,
    interrupt: Callable[[], object] = go_on,
) -> Made:
    """Make a backup, durable when this returns, and then remove all but the newest `keep`.

    `interrupt` is called now and then, and what it raises ends the work. Raises OuterstepError, with what to do.
    """
    with in_sentences(backups.disk, backups), backups.locked():
        copying = _Copying(source, backups, interrupt)
        copied = copying.until_nothing_is_gone(now)
        manifest = Manifest(
            number=max(backups.numbers(), default=0) + 1,
            made_at=copied.made_at,
            version=__version__,
            runs=copied.runs,
            database=content_of(copied.database),
            blobs=[blob for blob in copied.blobs if blob.name not in copied.lost],
            lost=sorted(copied.lost),
        )
        backups.add(manifest, copied.database, interrupt)
        return Made(manifest, copying.blobs, copying.bytes, pruning.prune(backups, keep))


@dataclass(frozen=True)
class _Copied:
    """The copy of a database that was made at some time, and the blobs that it needs: all are there but the `lost`."""

    made_at: float
    database: Path
    runs: list[RunSummary]
    blobs: list[Blob]
    lost: set[str]


class _Copying:
    """The copying of one backup, and how much of it was new."""

    def __init__(self, source: Source, backups: Place, interrupt: Callable[[], object]) -> None:
        self._source, self._backups, self._interrupt = source, backups, interrupt
        self.blobs = self.bytes = 0

    def until_nothing_is_gone(self, now: Callable[[], float]) -> _Copied:
        gone: set[str] = set()
        for _ in range(ATTEMPTS):
            made_at, copied = now(), self._backups.scratch()
            database.copy(self._source.database, copied)
            runs, blobs = needed(copied)
            missing = {blob.name for blob in blobs if not self._have(blob)}
            if missing <= gone:
                return _Copied(made_at, copied, runs, blobs, missing)
            gone |= missing
            copied.unlink()
        raise OuterstepError(
            f"after {ATTEMPTS} copies of the database there are still blobs that are deleted before they are copied: "
            "back up to a faster disk, or keep more checkpoints in the run's spec"
        )

    def _have(self, blob: Blob) -> bool:
        """Copy a blob unless it is there; return False if it is gone or spoilt."""
        self._interrupt()
        if self._backups.holds(blob):
            return True
        try:
            reader = self._source.open_blob(blob.name)
        except FileNotFoundError:
            return False
        with reader:
            if not self._backups.take_blob(reader, blob.digest, self._interrupt):
                return False
        self.blobs, self.bytes = self.blobs + 1, self.bytes + blob.size
        return True


@contextmanager
def in_sentences(disk: Path, place: object) -> Iterator[None]:
    """Raise OuterstepError, with what to do, for an OSError of the block, which writes below `disk`, and to `place`."""
    try:
        yield
    except OSError as error:
        kept = f"what was in {place} before is as it was"
        if disk_is_full(error):
            detail = f"the disk of {disk} is full: make room there, and do the same again"
            raise OuterstepError(f"{detail}; {kept}") from error
        raise OuterstepError(f"{error_text(error)}; {kept}") from error
