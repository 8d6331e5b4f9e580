"""Creating a backup in a directory, whether the coordinator is running or not.

First the database is copied, as of one moment. Then every blob that the copy's rows need is copied, unless an earlier
backup has stored it: blobs never change. Meanwhile a running coordinator may delete a blob that a newer checkpoint
replaces; it deletes the row before the blob. So if a blob is gone, the database is copied again, and blobs that were
already copied are kept. Usually the newer copy does not need the blob. If it does, the coordinator itself has lost the
blob, and the manifest lists it as lost.

The coordinator holds nothing back for a backup, so a backup that is killed leaves nothing to release. Copying
terminates as long as blobs are copied faster than the run produces them: each pass finds fewer new ones.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, Connection, create_engine, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute

from coordinator.backup.contents import DamagedBackup, content_of, never_interrupt
from coordinator.backup.directory import BackupDirectory
from coordinator.backup.manifest import Blob, Manifest, RunSummary
from coordinator.store import database
from coordinator.store.blobs import Reader, RunNames
from coordinator.store.database import disk_is_full
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, ContributionRow, FragmentRow, RunRow
from coordinator.sync.retention import first_delta
from outerstep.common.connections import error_text
from protocol import __version__
from protocol.errors import OuterstepError
from protocol.messages import FragmentState

ATTEMPTS = 20


@dataclass(frozen=True)
class BackupSource:
    """What to back up. `database`: its URL. `open_blob`: opens a blob, or raises FileNotFoundError if it is gone."""

    database: URL
    open_blob: Callable[[str], Reader]


@dataclass(frozen=True)
class CreatedBackup:
    """A new backup, how much of it was not stored before, and the numbers of the older backups that were then
    removed."""

    manifest: Manifest
    copied_blobs: int
    copied_bytes: int
    removed: list[int]


def create(
    source: BackupSource,
    backups: BackupDirectory,
    keep: int,
    now: Callable[[], float] = time.time,
    interrupt: Callable[[], object] = never_interrupt,
) -> CreatedBackup:
    """Create a backup, which is durable when this returns. Then remove all but the newest `keep`.

    `interrupt` is called now and then; an exception that it raises ends the backup. Raises OuterstepError with a
    remedy.
    """
    with os_errors_explained(backups.root, backups), backups.locked():
        copying = _Copier(source, backups, interrupt)
        copied = copying.until_complete(now)
        manifest = Manifest(
            number=max(backups.numbers(), default=0) + 1,
            made_at=copied.made_at,
            version=__version__,
            runs=copied.runs,
            database=content_of(copied.database),
            blobs=[blob for blob in copied.blobs if blob.name not in copied.lost],
            lost=sorted(copied.lost),
        )
        backups.add(manifest, copied.database)
        return CreatedBackup(manifest, copying.blobs, copying.bytes, prune(backups, keep))


@contextmanager
def os_errors_explained(disk: Path, kept: object) -> Iterator[None]:
    """Turn an OSError of the block into an OuterstepError with a remedy. `disk`: the directory that the block writes
    to. `kept`: names the place that keeps its earlier contents."""
    try:
        yield
    except OSError as error:
        unchanged = f"what {kept} contained before is unchanged"
        if disk_is_full(error):
            detail = f"the disk of {disk} is full: free some space there, and repeat the command"
            raise OuterstepError(f"{detail}; {unchanged}") from error
        raise OuterstepError(f"{error_text(error)}; {unchanged}") from error


# --- copying ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DatabaseCopy:
    """A copy of the database, when it was made, and the blobs that it needs. All of them are stored except the `lost`
    ones."""

    made_at: float
    database: Path
    runs: list[RunSummary]
    blobs: list[Blob]
    lost: set[str]


class _Copier:
    """Copies one backup, and counts the blobs and bytes that were not stored before."""

    def __init__(self, source: BackupSource, backups: BackupDirectory, interrupt: Callable[[], object]) -> None:
        self._source, self._backups, self._interrupt = source, backups, interrupt
        self.blobs = self.bytes = 0

    def until_complete(self, now: Callable[[], float]) -> _DatabaseCopy:
        gone: set[str] = set()
        for _ in range(ATTEMPTS):
            made_at, copied = now(), self._backups.scratch()
            database.copy(self._source.database, copied)
            runs, blobs = required_blobs(copied)
            missing = {blob.name for blob in blobs if not self._store(blob)}
            if missing <= gone:
                return _DatabaseCopy(made_at, copied, runs, blobs, missing)
            gone |= missing
            copied.unlink()
        raise OuterstepError(
            f"the database was copied {ATTEMPTS} times, and each time blobs were deleted before they were copied: "
            "back up to a faster disk, or keep more checkpoints in the run's spec"
        )

    def _store(self, blob: Blob) -> bool:
        """Store a blob unless it is stored already. Return False if it is gone or damaged."""
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


# --- which blobs a backup needs ---------------------------------------------------------------------------------------


def required_blobs(copied: Path) -> tuple[list[RunSummary], list[Blob]]:
    """Return the runs of a copied database, and the blobs that a backup of it needs, starting with those that will be
    deleted soonest.

    These are the checkpoints, every delta from the oldest of them on, the residuals of the newest deltas, and the
    contributions that are in no delta yet.
    Contributions that are in a delta are left out, although the coordinator keeps them until the next checkpoint. They
    are most of all bytes, and only serve to rebuild a damaged delta; in a backup, damage is found by the digest. Raises
    OuterstepError if this is not a coordinator's database.
    """
    engine = create_engine(URL.create("sqlite", database=str(copied)))
    try:
        with engine.connect() as connection:
            runs = connection.execute(
                select(RunRow.id, RunRow.name, RunRow.state, RunRow.round).order_by(RunRow.name)
            ).all()
            ids = {id_: RunNames(name) for id_, name, *_ in runs}
            blobs = [
                *(blob for id_, names in ids.items() for blob in _contributions(connection, id_, names)),
                *(blob for id_, names in ids.items() for blob in _deltas(connection, id_, names)),
                *(blob for id_, names in ids.items() for blob in _checkpoints(connection, id_, names)),
                *(blob for id_, _, _, at in runs for blob in _residuals(connection, id_, ids[id_], at)),
            ]
    except DBAPIError as error:
        raise OuterstepError(f"this is not a coordinator's database: {error.orig}") from error
    finally:
        engine.dispose()
    return [RunSummary(name=name, state=state, round=round_) for _, name, state, round_ in runs], blobs


def _contributions(connection: Connection, run_id: int, names: RunNames) -> list[Blob]:
    row, fragment = ContributionRow, FragmentRow
    same = (fragment.run_id == row.run_id) & (fragment.round == row.round) & (fragment.fragment == row.fragment)
    rows = connection.execute(
        select(row.round, row.fragment, row.worker, row.digest, row.size)
        .join(fragment, same)
        .where(row.run_id == run_id, fragment.state != FragmentState.PUBLISHED)
        .order_by(row.round, row.fragment, row.worker)
    )
    return [
        Blob(name=names.contribution(round_, index, worker, digest), digest=digest.hex(), size=size)
        for round_, index, worker, digest, size in rows
    ]


def _deltas(connection: Connection, run_id: int, names: RunNames) -> list[Blob]:
    # Every complete checkpoint with a row counts, even one that is about to be deleted. Rows are deleted before blobs,
    # so its blobs and the deltas after it still existed when the database was copied.
    kept = list(
        connection.scalars(
            select(CheckpointRow.round).where(CheckpointRow.run_id == run_id).order_by(CheckpointRow.round.desc())
        )
    )
    row, first = FragmentRow, first_delta(kept) if kept else 0
    return _of_fragments(connection, run_id, first, (row.delta_digest, row.delta_bytes), names.delta)


def _residuals(connection: Connection, run_id: int, names: RunNames, run_round: int) -> list[Blob]:
    row = FragmentRow
    columns = (row.residual_digest, row.residual_bytes)
    return _of_fragments(connection, run_id, run_round - 1, columns, names.residual)


def _of_fragments(
    connection: Connection,
    run_id: int,
    first: int,
    columns: tuple[InstrumentedAttribute[bytes | None], InstrumentedAttribute[int | None]],
    name: Callable[[int, int, bytes], str],
) -> list[Blob]:
    """Return the blobs of fragments from round `first` on, whose digest and size are in these columns."""
    row, (digest, size) = FragmentRow, columns
    rows = connection.execute(
        select(row.round, row.fragment, digest, size)
        .where(row.run_id == run_id, digest.is_not(None), row.round >= first)
        .order_by(row.round, row.fragment)
    )
    return [
        Blob(name=name(round_, index, found), digest=found.hex(), size=bytes_)
        for round_, index, found, bytes_ in rows
        if found is not None
    ]


def _checkpoints(connection: Connection, run_id: int, names: RunNames) -> list[Blob]:
    row = CheckpointFragmentRow
    rows = connection.execute(
        select(row.round, row.fragment, row.digest, row.size)
        .where(row.run_id == run_id)
        .order_by(row.round, row.fragment)
    )
    return [
        Blob(name=names.checkpoint(round_, index, digest), digest=digest.hex(), size=size)
        for round_, index, digest, size in rows
    ]


# --- which backups are kept -------------------------------------------------------------------------------------------


def superseded(numbers: list[int], keep: int) -> list[int]:
    """Return those of the backups `numbers` that are not among the newest `keep`."""
    return sorted(numbers, reverse=True)[keep:]


def prune(backups: BackupDirectory, keep: int) -> list[int]:
    """Remove all but the newest `keep` backups, and the blobs that no backup needs. Return the numbers of the removed
    backups. Call it within `locked`, once the newest backup is durable."""
    readable, unreadable = _manifests(backups)
    removed = superseded(list(readable), keep)
    for number in removed:
        backups.remove(number)
        del readable[number]
    backups.remove_databases_but(list(readable.values()), unreadable)
    if not unreadable:  # an unreadable backup may need any blob; a later version may read it, or an operator repair it
        needed = {blob.digest for manifest in readable.values() for blob in manifest.blobs}
        backups.remove_blobs([digest for digest in backups.digests() if digest not in needed])
    return removed


def _manifests(backups: BackupDirectory) -> tuple[dict[int, Manifest], set[int]]:
    """Return the manifests that can be read, by number, and the numbers of the others."""
    readable: dict[int, Manifest] = {}
    unreadable: set[int] = set()
    for number in backups.numbers():
        try:
            readable[number] = backups.manifest(number)
        except DamagedBackup:
            unreadable.add(number)
    return readable, unreadable
