"""Moving the blobs of a stopped coordinator: from its data directory to a bucket, to another bucket, or back.

Every blob is copied and read back, and its digest is compared with that of the bytes in the old place. Then the file
`bucket` in the data directory changes to the new place, which is the move: before that the old place is complete, after
it the new one. Last the old blobs are deleted.

The file `moving` makes the move resumable. Its first line names both places, and each further line a blob that was
verified in the new place. It is deleted last.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

from coordinator.backup.contents import content_of, is_whole
from coordinator.backup.create import os_errors_explained
from coordinator.store import sqlite
from coordinator.store.blobs import OWNER, Blobs, OwnedBucket
from coordinator.store.data_directory import DataDirectory
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.opening import MARK, FileMark, objects_at, usable
from outerstep.common.files import fsync, replace_file
from protocol.errors import OuterstepError

DIRECTORY = "directory"
JOURNAL = "moving"
_DIGEST = re.compile(r"\.([0-9a-f]{16})$")  # at the end of a blob's name, the beginning of its BLAKE3 digest


@dataclass(frozen=True)
class Progress:
    """How many blobs and bytes have been moved, and how many there are."""

    blobs: int
    of_blobs: int
    bytes: int
    of_bytes: int


@dataclass(frozen=True)
class _Places:
    """Where blobs are moved from and to: DIRECTORY or a URL; with the owner's id if it is a bucket."""

    source: str
    source_owner: str
    target: str
    target_owner: str

    @classmethod
    def new(cls, data: DataDirectory, target: str) -> Self:
        source_owner, source = FileMark(data.root).read() or ("", DIRECTORY)
        return cls(source, source_owner, target, secrets.token_hex(16))


def move(data_dir: Path, target: str, progress: Callable[[Progress], object] = lambda _: None) -> Progress:
    """Move the blobs of `data_dir` to `target`: the URL of a bucket, or DIRECTORY. Return what was moved. `progress` is
    called after each blob.

    Raises OuterstepError: the coordinator runs, the target is not usable or belongs to another coordinator, a blob is
    damaged in the old place or cannot be stored in the new one; a store or a disk fails.
    """
    if not any((data_dir / each).exists() for each in (sqlite.FILE, MARK, "runs")):
        raise OuterstepError(f"{data_dir} is not a coordinator's data directory: give another --data")
    with closing(DataDirectory(data_dir)) as data:
        journal = data.root / JOURNAL
        if journal.exists():
            places = _Places(**json.loads(journal.read_text(encoding="utf-8").splitlines()[0]))
            if target.rstrip("/") != places.target:
                raise OuterstepError(
                    f"a move from {places.source} to {places.target} has begun: repeat that command to finish it, or "
                    f"delete {journal} and what was copied to {places.target}"
                )
        else:
            places = _Places.new(data, target.rstrip("/"))
            if places.source == places.target:
                raise OuterstepError(f"the files of {data_dir} are in {places.target} already")
            _check(places)
            replace_file(journal, lambda file: file.write(json.dumps(asdict(places)).encode() + b"\n"))
        moved = Progress(0, 0, 0, 0)
        if _marked_place(data) != places.target:
            with os_errors_explained(data_dir, data_dir if places.source == DIRECTORY else places.source):
                moved = _copy_all(data, places, journal, progress)
                _switch(data, places)
        _delete_old(data, places)
        journal.unlink()
        fsync(data.root)
        return moved


def _marked_place(data: DataDirectory) -> str:
    found = FileMark(data.root).read()
    return DIRECTORY if found is None else found[1]


def _check(places: _Places) -> None:
    """Raise OuterstepError unless the target can be used and is free."""
    if places.target == DIRECTORY:
        return
    objects = objects_at(places.target)
    usable(objects)
    if objects.get(OWNER) is not None:
        raise OuterstepError(f"the bucket {objects} belongs to another coordinator: give another prefix")


def _opened(data: DataDirectory, place: str, owner: str) -> Blobs:
    if place == DIRECTORY:
        return DirectoryBlobs(data)
    from coordinator.store.object_blobs import ObjectBlobs

    objects = objects_at(place)
    if (bucket := OwnedBucket.taken(objects, owner)) is None:
        raise OuterstepError(f"the bucket {objects} belongs to another coordinator now")
    return ObjectBlobs(bucket, data, cache_bytes=0)


def _blobs(blobs: Blobs) -> Iterator[tuple[str, int]]:
    """Yield the name and size of each blob. The outer states beside them in the data directory are no blobs."""
    for name, size in blobs.list("runs/"):
        if name.split("/")[2] != "state":
            yield name, size


# --- copying ----------------------------------------------------------------------------------------------------------


def _copy_all(data: DataDirectory, places: _Places, journal: Path, progress: Callable[[Progress], object]) -> Progress:
    source = _opened(data, places.source, places.source_owner)
    target = _opened(data, places.target, places.target_owner)
    found, there = dict(_blobs(source)), dict(_blobs(target))
    # Since an earlier attempt, the coordinator may have run, and blobs may have been lost in the new place.
    noted = journal.read_text(encoding="utf-8").splitlines()[1:]
    verified = {name for name in noted if _DIGEST.search(name) and name in found and there.get(name) == found[name]}
    target.delete(*(there.keys() - found.keys()))
    total, count, moved = sum(found.values()), 0, 0
    with journal.open("a", encoding="utf-8") as file:
        for name, size in sorted(found.items()):
            if name not in verified:
                copy_verified(data, source, target, name)
                file.write(f"{name}\n")
                file.flush()
                os.fsync(file.fileno())
            count, moved = count + 1, moved + size
            progress(Progress(count, len(found), moved, total))
    return Progress(count, len(found), moved, total)


def copy_verified(data: DataDirectory, source: Blobs, target: Blobs, name: str) -> None:
    """Copy a blob, and compare what was read in both places. Raises OuterstepError if it is damaged in `source`, or not
    the same in `target`."""
    file = data.scratch()
    try:
        source.fetch(name, file)
        content, stored = content_of(file), partial(target.open, name, fresh=True)
        known = _DIGEST.search(name)
        if known is not None and not content.digest.startswith(known[1]):
            raise OuterstepError(
                f"{name} is damaged: start the coordinator, which checks its files every hour and rebuilds this one "
                "or gives it up; then stop it and repeat the command"
            )
        if not target.put(name, file) and not is_whole(stored, content):  # what a killed attempt has left
            target.delete(name)
            target.put(name, file)
    finally:
        file.unlink(missing_ok=True)
    if not is_whole(stored, content):
        raise OuterstepError(f"{name} has other bytes in the new place than were written: repeat the command")


# --- the new place in the place of the old one ------------------------------------------------------------------------


def _switch(data: DataDirectory, places: _Places) -> None:
    if places.target == DIRECTORY:
        FileMark(data.root).clear()
    else:
        FileMark(data.root).write(places.target_owner, places.target)


def _delete_old(data: DataDirectory, places: _Places) -> None:
    if places.source == DIRECTORY:
        blobs = DirectoryBlobs(data)
        blobs.delete(*(name for name, _ in _blobs(blobs)))
        return
    objects = objects_at(places.source)
    found = objects.get(OWNER)
    if found is not None and found[0] == places.source_owner.encode():  # else it was deleted before a kill
        for folder in ("runs", "database"):
            objects.delete([f"{folder}/{name}" for name, _ in objects.within(folder)])
        objects.delete([OWNER])
