"""What a backup consists of: a copy of the database, the blobs that its rows need, and a manifest. The database lists
the blobs with their digests, and the manifest has the digest of the database: so every byte can be verified."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from sqlalchemy import URL, Connection, create_engine, select
from sqlalchemy.exc import DBAPIError

from coordinator.store.blobs import FileReader, RunNames, StoreOutage
from coordinator.store.database import Database, disk_is_full
from coordinator.store.payloads import READ_BYTES, digest_of
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, ContributionRow, FragmentRow, RunRow
from coordinator.sync.retention import first_delta
from outerstep.common.connections import error_text
from outerstep.common.files import Writer
from protocol.digest import digest
from protocol.errors import OuterstepError
from protocol.messages import FragmentState

# Names as `RunNames` makes them. No part begins with a dot, so a name cannot point outside of `runs/`.
BlobName = Annotated[str, StringConstraints(pattern=r"^runs(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$")]


class DamagedBackup(OuterstepError):
    """A backup is incomplete or corrupt; the message explains how."""


class BackupInterrupted(Exception):
    """The coordinator is stopping. Blobs that were copied are kept, and the next backup continues from there."""


def never_interrupt() -> None:
    """Do nothing: the `interrupt` argument of a backup that must not be interrupted."""


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


# --- the manifest -----------------------------------------------------------------------------------------------------


class Frozen(BaseModel):
    """An immutable model that allows no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Content(Frozen):
    """The BLAKE3 digest, in hex, and the size in bytes of a file or blob."""

    digest: str
    size: int = Field(ge=0)


class Blob(Content):
    """A blob, with its name in the coordinator's store."""

    name: BlobName


class RunSummary(Frozen):
    """A run and its progress."""

    name: str
    state: str
    round: int


class Manifest(Frozen):
    """A backup. `made_at`: in seconds since 1970. `lost`: blobs that rows name, but that were missing or damaged in the
    coordinator's own store."""

    number: int = Field(ge=1)
    made_at: float
    runs: list[RunSummary]
    database: Content
    lost: list[str]


def encode(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file: a line with the digest of the rest, and a JSON object."""
    body = manifest.model_dump_json(indent=1).encode() + b"\n"
    return digest(body).hex().encode() + b"\n" + body


def decode(content: bytes, number: int) -> Manifest:
    """Return the manifest of backup `number` that was encoded. Raises DamagedBackup."""
    expected, _, body = content.partition(b"\n")
    if digest(body).hex().encode() != expected:
        raise DamagedBackup("its manifest is not what was written")
    try:
        manifest = Manifest.model_validate_json(body)
    except ValidationError as error:
        raise DamagedBackup("its manifest is of another version of Outerstep; use that one") from error
    if manifest.number != number:
        raise DamagedBackup(f"its manifest is that of backup {manifest.number}")
    return manifest


# --- files ------------------------------------------------------------------------------------------------------------


def content_of(path: Path) -> Content:
    """Return the digest and size of a file."""
    with FileReader(path) as reader:
        return Content(digest=digest_of(reader).hex(), size=reader.size)


def copy_whole(
    read_into: Callable[[memoryview, int], int],
    target: Path,
    content: Content,
    interrupt: Callable[[], object] = never_interrupt,
) -> bool:
    """Copy bytes to the new file `target`, durably. `read_into` is that of a `Reader`, and is called in order. If the
    bytes cannot be read, or are not of this `content`, leave no file and return False.

    Raises OSError if `target` cannot be written, and StoreOutage. May raise what `interrupt` raises.
    """
    hasher, memory, at = blake3(), memoryview(bytearray(READ_BYTES)), 0
    try:
        # Bypass the page cache: the copy is not read again soon, and the coordinator needs the cache.
        with Writer(target, 0o600) as file:
            while at <= content.size and (count := _read(read_into, memory, at)):
                interrupt()
                hasher.update(memory[:count])
                file.write(memory[:count])
                at += count
            file.end()
            os.fsync(file.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    if hasher.hexdigest() == content.digest:
        return True
    target.unlink()
    return False


def _read(read_into: Callable[[memoryview, int], int], memory: memoryview, at: int) -> int:
    """Return the number of bytes read: 0 at the end, and also if the disk fails; the digest then does not match. Raises
    StoreOutage, which says nothing about the bytes."""
    try:
        return read_into(memory, at)
    except StoreOutage:
        raise
    except OSError:
        return 0


# --- which blobs a backup needs ---------------------------------------------------------------------------------------


def blobs_of(manifest: Manifest, copied: Path) -> list[Blob]:
    """Return the blobs of a backup. `copied`: a copy of its database, which is migrated to the newest schema. Raises
    OuterstepError if its schema is unknown."""
    Database(URL.create("sqlite", database=str(copied))).close()
    _, blobs = required_blobs(copied)
    return [blob for blob in blobs if blob.name not in manifest.lost]


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
            columns = RunRow.id, RunRow.name, RunRow.state, RunRow.round
            runs = connection.execute(select(*columns).order_by(RunRow.name)).all()
            by_run = [_blobs_of_run(connection, id_, RunNames(name), round_) for id_, name, _, round_ in runs]
    except DBAPIError as error:
        raise OuterstepError(f"this is not a coordinator's database: {error.orig}") from error
    except ValidationError as error:
        raise OuterstepError("this database names files outside of a data directory") from error
    finally:
        engine.dispose()
    summaries = [RunSummary(name=name, state=state, round=round_) for _, name, state, round_ in runs]
    return summaries, [blob for kinds in zip(*by_run, strict=True) for blobs in kinds for blob in blobs]


def _blobs_of_run(connection: Connection, run_id: int, names: RunNames, run_round: int) -> list[list[Blob]]:
    """Return the contributions, deltas, checkpoints and residuals of a run that a backup needs."""
    given, fragment, saved = ContributionRow, FragmentRow, CheckpointFragmentRow
    # Every complete checkpoint with a row counts, even one that is about to be deleted. Rows are deleted before blobs,
    # so its blobs and the deltas after it still existed when the database was copied.
    checkpoints = select(CheckpointRow.round).where(CheckpointRow.run_id == run_id).order_by(CheckpointRow.round.desc())
    kept = list(connection.scalars(checkpoints))
    first = first_delta(kept) if kept else 0
    same = (fragment.run_id == given.run_id) & (fragment.round == given.round) & (fragment.fragment == given.fragment)
    queries: list[tuple[Callable[..., str], Any]] = [
        (
            names.contribution,
            select(given.round, given.fragment, given.worker, given.digest, given.size)
            .join(fragment, same)
            .where(given.run_id == run_id, fragment.state != FragmentState.PUBLISHED),
        ),
        (
            names.delta,
            select(fragment.round, fragment.fragment, fragment.delta_digest, fragment.delta_bytes).where(
                fragment.run_id == run_id, fragment.round >= first, fragment.delta_digest.is_not(None)
            ),
        ),
        (
            names.checkpoint,
            select(saved.round, saved.fragment, saved.digest, saved.size).where(saved.run_id == run_id),
        ),
        (
            names.residual,
            select(fragment.round, fragment.fragment, fragment.residual_digest, fragment.residual_bytes).where(
                fragment.run_id == run_id, fragment.round >= run_round - 1, fragment.residual_digest.is_not(None)
            ),
        ),
    ]
    return [
        [
            Blob(name=name(*place, content), digest=content.hex(), size=size)
            for *place, content, size in connection.execute(query.order_by(*query.selected_columns[:2]))
        ]
        for name, query in queries
    ]
