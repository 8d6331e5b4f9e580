"""Opening the store of a coordinator's blobs: its data directory, or a bucket.

A store belongs to one coordinator: its start deletes blobs that its database does not name. So a bucket has the object
`owner`, and the data directory the file `bucket`, with the same random id. A directory without that id does not get the
bucket, and a directory with it does not start without the bucket.
"""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.store.blobs import OWNER, Blobs, FileReader, OpenStore, OwnedBucket, Reader
from coordinator.store.data_directory import DataDirectory
from coordinator.store.directory_blobs import DirectoryBlobs
from outerstep.common.files import replace_file
from protocol.errors import OuterstepError

if TYPE_CHECKING:
    from outerstep.common.objects import Objects

logger = logging.getLogger(__name__)

MARK = "bucket"  # in the data directory


def store_at(url: str | None, public_url: str | None = None, now: Callable[[], float] = time.time) -> OpenStore:
    """Return what opens the store at `url`; None: the data directory. Opening raises OuterstepError if the store cannot
    be used, or belongs to another data directory. `public_url`: where the bucket's prefix can be downloaded from."""

    def opened(data: DataDirectory) -> Blobs:
        return _directory(data) if url is None else _bucket(url, public_url, data, now)

    return opened


def reader_of(data_dir: Path) -> Callable[[str], Reader]:
    """Return a function that opens the blobs of a data directory, or of its bucket, for reading. The coordinator may be
    running."""
    if (marked := marked_bucket(data_dir)) is None:
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
    """Raise OuterstepError with the reason if a coordinator cannot use the bucket."""
    from outerstep.common.bucket_check import check_bucket

    for finding in check_bucket(objects, now):
        if finding.fault is not None:
            raise OuterstepError(f"the bucket {objects} cannot be used: {finding.fault}")


def _directory(data: DataDirectory) -> Blobs:
    if (marked := marked_bucket(data.root)) is not None:
        raise OuterstepError(f"the blobs of {data.root} are in the bucket {marked[1]}: give --blobs {marked[1]}")
    return DirectoryBlobs(data)


def _bucket(url: str, public_url: str | None, data: DataDirectory, now: Callable[[], float]) -> Blobs:
    objects = objects_at(url)
    from coordinator.store.direct_access import open_direct
    from coordinator.store.object_blobs import ObjectBlobs

    marked = marked_bucket(data.root)
    if marked is None and any((data.root / "runs").glob("*/c*/*")):
        raise OuterstepError(f"the blobs of {data.root} are in its folder runs: start without --blobs")
    moved = marked is not None and marked[1] != str(objects)
    if marked is not None and moved and objects.get(OWNER) is None:
        raise OuterstepError(
            f"the blobs of {data.root} are in {marked[1]}, and {objects} has none: give --blobs {marked[1]}, or move "
            f"them first (outerstep coordinator move {objects})"
        )
    usable(objects, now)
    own = secrets.token_hex(16) if marked is None else marked[0]
    if marked is None:
        mark(data, own, str(objects))  # first, so that a killed first start can be repeated
    if (bucket := OwnedBucket.taken(objects, own)) is None:
        if marked is None:
            (data.root / MARK).unlink()
            remedy = "give another prefix, or restore it from there (outerstep coordinator restore --blobs)"
        else:
            remedy = "it was restored there since, so do not start this one"
        raise OuterstepError(f"the bucket {objects} belongs to the coordinator of another data directory: {remedy}")
    if marked is not None and moved:
        logger.info("the blobs are now at %s, no longer at %s", objects, marked[1])
        mark(data, own, str(objects))
    logger.info("blobs are in the bucket %s", objects)
    return ObjectBlobs(bucket, data, direct=open_direct(objects, public_url))


def marked_bucket(root: Path) -> tuple[str, str] | None:
    """Return the id and the URL of the bucket that has the blobs of this data directory; None if it has them itself."""
    try:
        own, _, url = (root / MARK).read_text(encoding="utf-8").strip().partition(" ")
    except FileNotFoundError:
        return None
    return own, url.rstrip("/")


def mark(data: DataDirectory, own: str, url: str) -> None:
    """Record durably that the blobs of this data directory are at `url`, in the bucket with the owner `own`."""
    replace_file(data.root / MARK, lambda file: file.write(f"{own} {url}\n".encode()))
