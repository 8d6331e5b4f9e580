"""Opening the store of a coordinator's blobs: its data directory, or a bucket.

A store belongs to one database: a coordinator's start deletes blobs that its database does not name. So a bucket has
the object `owner`, and the database's row `deployment` has the same random id. A database without that id does not get
the bucket, and one with it is not used without the bucket.
"""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import URL

from coordinator.store.blobs import OWNER, Blobs, FileReader, OpenStore, OwnedBucket, Reader
from coordinator.store.data_directory import CACHE_BYTES, COPIES, DataDirectory
from coordinator.store.database import Database, bucket_of
from coordinator.store.directory_blobs import DirectoryBlobs
from protocol.errors import OuterstepError, Transient

if TYPE_CHECKING:
    from outerstep.common.objects import Objects

logger = logging.getLogger(__name__)


def store_at(
    url: str | None,
    database: Database,
    public_url: str | None = None,
    now: Callable[[], float] = time.time,
    leads: Callable[[], bool] | None = None,
) -> OpenStore:
    """Return what opens the store at `url`; None: the data directory. Opening raises OuterstepError if the store cannot
    be used, or belongs to another database. `public_url`: where the bucket's prefix can be downloaded from. `leads`: as
    `OwnedBucket` has it."""

    def opened(data: DataDirectory) -> Blobs:
        if url is not None:
            return _bucket(url, public_url, data, now, database, leads)
        if (marked := database.bucket()) is not None:
            raise OuterstepError(f"the blobs of {data.root} are in the bucket {marked[1]}: give --blobs {marked[1]}")
        return DirectoryBlobs(data)

    return opened


def reader_of(data_dir: Path, database: URL) -> Callable[[str], Reader]:
    """Return a function that opens the blobs of a data directory, or of the bucket that the database names, for
    reading. The coordinator may be running. Raises OuterstepError if the database cannot be read."""
    marked = bucket_of(database)
    if marked is None:
        return lambda name: FileReader(data_dir / name)
    return objects_at(marked[1]).open


def objects_at(url: str) -> "Objects":
    """Return the objects of a bucket. Raises OuterstepError, also if obstore is not installed."""
    try:
        from outerstep.common.objects import Objects
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise OuterstepError(f"{url} needs obstore: pip install 'outerstep[coordinator,remote]'") from error
    return Objects(url)


def usable(objects: "Objects", now: Callable[[], float] = time.time) -> None:
    """Raise OuterstepError with the reason if a coordinator cannot use the bucket; Transient if it may be able to
    later."""
    from outerstep.common.bucket_check import check_bucket

    for finding in check_bucket(objects, now):
        if finding.fault is not None:
            kind = Transient if finding.passing else OuterstepError
            raise kind(f"the bucket {objects} cannot be used: {finding.fault}")


def shared_bucket(
    owner: str, url: str, data: DataDirectory, cache_bytes: int = CACHE_BYTES, copies: str = COPIES
) -> Blobs:
    """Open the bucket at `url` for a process that reads and puts blobs, and never deletes any. Local copies are in the
    folder `copies` of the data directory.

    Raises OuterstepError unless `owner` is the bucket's owner.
    """
    bucket = OwnedBucket(objects_at(url), owner, leads=_never)
    from coordinator.store.object_blobs import ObjectBlobs

    if not bucket.is_owned():
        raise OuterstepError(f"the bucket {bucket.objects} does not belong to the coordinators of this database")
    return ObjectBlobs(bucket, data, cache_bytes, copies=copies)


def _never() -> bool:
    return False


def _bucket(
    url: str,
    public_url: str | None,
    data: DataDirectory,
    now: Callable[[], float],
    database: Database,
    leads: Callable[[], bool] | None,
) -> Blobs:
    objects = objects_at(url)
    from coordinator.store.direct_access import open_direct
    from coordinator.store.object_blobs import ObjectBlobs

    marked = database.bucket()
    if marked is None and any((data.root / "runs").glob("*/c*/*")):
        raise OuterstepError(f"the blobs of {data.root} are in its folder runs: start without --blobs")
    moved = marked is not None and marked[1] != str(objects)
    if marked is not None and moved and objects.get(OWNER) is None:
        raise OuterstepError(
            f"the blobs of {data.root} are in {marked[1]}, and {objects} has none: give --blobs {marked[1]}, or make a "
            "backup and restore it there (outerstep coordinator restore --blobs)"
        )
    usable(objects, now)
    own = secrets.token_hex(16) if marked is None else marked[0]
    if marked is None:
        database.set_bucket((own, str(objects)))  # first, so that a killed first start can be repeated
    if (bucket := OwnedBucket.taken(objects, own, leads)) is None:
        if marked is None:
            database.set_bucket(None)
            remedy = f"give another prefix, or restore it from there (outerstep coordinator restore {objects})"
        else:
            remedy = "it was restored there since, so do not start this one"
        raise OuterstepError(f"the bucket {objects} belongs to the coordinator of another database: {remedy}")
    if marked is not None and moved:
        logger.info("the blobs are now at %s, no longer at %s", objects, marked[1])
        database.set_bucket((own, str(objects)))
    logger.info("blobs are in the bucket %s", objects)
    return ObjectBlobs(bucket, data, direct=open_direct(objects, public_url))
