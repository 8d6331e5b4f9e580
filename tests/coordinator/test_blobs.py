"""What a store of blobs promises, of each store that there is; and what only a directory has to take care of."""

import errno
import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.store import directory_blobs
from coordinator.store.blobs import Blobs, OwnedBucket, RunNames, round_of
from coordinator.store.data_directory import DataDirectory
from coordinator.store.directory_blobs import DirectoryBlobs
from harness.seaweedfs import SeaweedFS
from harness.stores import MemoryBlobs, read

_numbers = itertools.count()

NAMES = RunNames("r")
NAME = NAMES.contribution(1, 0, "w", bytes(32))


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDirectory]:
    with closing(DataDirectory(tmp_path / "data")) as data:
        yield data


@pytest.fixture
def bucket(store: SeaweedFS, data: DataDirectory) -> Blobs:
    from coordinator.store.object_blobs import ObjectBlobs
    from outerstep.common.objects import Objects

    owned = OwnedBucket.taken(Objects(store.url(f"{next(_numbers)}/prefix")), "its owner")
    assert owned is not None
    return ObjectBlobs(owned, data)


@pytest.fixture(params=["directory", "memory", "bucket"])
def blobs(request: pytest.FixtureRequest, data: DataDirectory) -> Blobs:
    if request.param == "bucket":
        found: Blobs = request.getfixturevalue("bucket")
        return found
    return DirectoryBlobs(data) if request.param == "directory" else MemoryBlobs()


@pytest.mark.slow
def test_what_was_put_is_there_until_it_is_deleted(blobs: Blobs) -> None:
    assert blobs.stat(NAME) is None
    assert blobs.put(NAME, b"some bytes")
    assert blobs.stat(NAME) == 10
    assert list(blobs.list("runs/r/")) == list(blobs.list(NAMES.kind("contributions"))) == [(NAME, 10)]
    assert list(blobs.list(NAMES.kind("deltas"))) == list(blobs.list("runs/another/")) == []
    assert read(blobs, NAME) == b"some bytes"
    for _ in range(2):
        blobs.delete(NAME)
        assert blobs.stat(NAME) is None
    assert list(blobs.list("runs/r/")) == []
    with pytest.raises(FileNotFoundError):
        blobs.open(NAME)


def test_a_name_never_gets_other_bytes(blobs: Blobs, data: DataDirectory) -> None:
    another = data.scratch()
    another.write_bytes(b"another")
    assert blobs.put(NAME, b"first")
    assert not blobs.put(NAME, b"second")
    assert not blobs.put(NAME, another)
    assert read(blobs, NAME) == b"first"


def test_a_range_is_read_wherever_it_lies(blobs: Blobs) -> None:
    blobs.put(NAME, bytes(range(100)))
    with blobs.open(NAME) as reader:
        for at, length, expected in ((0, 4, range(4)), (90, 4, range(90, 94)), (96, 10, range(96, 100)), (100, 5, [])):
            memory = memoryview(bytearray(length))
            count = reader.read_into(memory, at)
            assert memory[:count].tolist() == list(expected)


def test_a_blob_that_is_open_can_be_read_though_it_is_deleted(blobs: Blobs) -> None:
    blobs.put(NAME, b"some bytes")
    with blobs.open(NAME) as reader:
        blobs.delete(NAME)
        memory = bytearray(reader.size)
        assert reader.read_into(memoryview(memory), 0) == 10
    assert memory == b"some bytes"


def test_a_local_file_is_put_and_fetched_and_stays_what_it_is(blobs: Blobs, data: DataDirectory) -> None:
    source, target = data.scratch(), data.scratch()
    source.write_bytes(b"of a file")
    target.write_bytes(b"older")
    assert blobs.put(NAME, source)
    blobs.fetch(NAME, target)
    assert source.read_bytes() == target.read_bytes() == read(blobs, NAME) == b"of a file"
    source.unlink()
    target.unlink()
    assert read(blobs, NAME) == b"of a file"
    blobs.delete(NAME)
    with pytest.raises(FileNotFoundError):
        blobs.fetch(NAME, target)


def test_a_blob_that_is_renamed_has_the_other_name(blobs: Blobs) -> None:
    blobs.put(NAME, b"some bytes")
    blobs.rename(NAME, "runs/r/set-aside/0/x")
    assert list(blobs.list("runs/r/")) == [("runs/r/set-aside/0/x", 10)]
    assert read(blobs, "runs/r/set-aside/0/x") == b"some bytes"
    with pytest.raises(FileNotFoundError):
        blobs.rename(NAME, "runs/r/set-aside/0/y")


def test_an_object_too_large_to_be_copied_by_the_store_is_renamed_too(
    bucket: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.object_blobs.COPIED_BYTES", 5)
    bucket.put(NAME, b"some bytes")
    bucket.rename(NAME, "runs/r/set-aside/0/x")
    assert list(bucket.list("runs/r/")) == [("runs/r/set-aside/0/x", 10)]
    assert read(bucket, "runs/r/set-aside/0/x") == b"some bytes"


def test_names_say_what_it_is() -> None:
    digest = bytes(range(32))
    names = [NAMES.contribution(7, 1, "w", digest), NAMES.delta(7, 1, digest), NAMES.checkpoint(7, 1, digest)]
    assert names == [
        "runs/r/contributions/7/1.w.0001020304050607",
        "runs/r/deltas/7/1.0001020304050607",
        "runs/r/checkpoints/7/1.0001020304050607",
    ]
    assert [round_of(name) for name in names] == [7, 7, 7]


# --- a directory ------------------------------------------------------------------------------------------------------


def test_nothing_is_left_in_scratch_and_folders_of_rounds_go_with_their_last_blob(data: DataDirectory) -> None:
    blobs = DirectoryBlobs(data)
    for name in (NAME, NAMES.contribution(1, 1, "w", bytes(32))):
        blobs.put(name, b"bytes")
        assert list((data.root / "incoming").iterdir()) == []
    blobs.delete(NAME)
    assert (data.root / NAME).parent.is_dir()
    blobs.delete(NAMES.contribution(1, 1, "w", bytes(32)))
    assert not (data.root / NAME).parent.exists()
    assert blobs.put(NAME, b"bytes")


def test_a_put_that_fails_leaves_nothing(data: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory_blobs, "fsync", fail)
    blobs = DirectoryBlobs(data)
    with pytest.raises(OSError, match="No space"):
        blobs.put(NAME, b"bytes")
    assert blobs.stat(NAME) is None
    assert list((data.root / "incoming").iterdir()) == []


def test_what_is_put_into_a_folder_that_was_found_survives_a_power_cut(
    data: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by simulation seed 146: kill -9 between mkdir and fsync of a round's folder; after the restart a contribution
    was acknowledged in it; then the power went, and the folder with it."""
    (data.root / NAME).parent.mkdir(parents=True)
    durable: list[Path] = []
    monkeypatch.setattr(directory_blobs, "fsync", durable.append)
    DirectoryBlobs(data).put(NAME, b"bytes")
    for folder in (data.root / NAME).parents:
        assert folder in durable
        if folder == data.root:
            break


def test_a_folder_whose_fsync_failed_is_not_taken_for_durable_later(
    data: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by simulation seed 121: the disk was full as a round's folder was made; when there was room again a
    contribution was acknowledged in it; then the power went, and the folder with it."""
    durable: list[Path] = []
    full = True

    def fsync(path: Path) -> None:
        if full and path.is_dir():
            raise OSError(errno.ENOSPC, "No space left on device")
        durable.append(path)

    monkeypatch.setattr(directory_blobs, "fsync", fsync)
    blobs = DirectoryBlobs(data)
    with pytest.raises(OSError, match="No space"):
        blobs.put(NAME, b"bytes")
    full = False
    blobs.put(NAME, b"bytes")
    assert (data.root / NAME).parents[1] in durable, "the folder of the round"
    assert read(blobs, NAME) == b"bytes"


def test_whoever_finds_a_blob_that_another_is_just_putting_waits_for_no_luck(
    data: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that finds the name taken returns as durably as one that made it: the other may not have fsynced yet."""
    blobs = DirectoryBlobs(data)
    blobs.put(NAME, b"bytes")
    durable: list[Path] = []
    monkeypatch.setattr(directory_blobs, "fsync", durable.append)
    assert not blobs.put(NAME, b"bytes")
    assert (data.root / NAME).parent in durable


def test_what_cannot_be_listed_is_told(data: DataDirectory) -> None:
    """Not taken for an empty store: the start sweeps by that list, and the retention rule deletes by it."""
    (data.root / "runs" / "r").mkdir(parents=True)
    (data.root / "runs" / "r" / "deltas").write_bytes(b"no folder")
    blobs = DirectoryBlobs(data)
    with pytest.raises(NotADirectoryError):
        list(blobs.list(NAMES.kind("deltas")))
    assert list(blobs.list(NAMES.kind("checkpoints"))) == []


def test_a_state_that_is_replaced_while_the_bytes_are_counted_counts_for_nothing(data: DataDirectory) -> None:
    states = data.states("r")
    states.path(0, 0).write_bytes(b"state")
    states.path(0, 1).symlink_to("gone")
    assert states.bytes() == 5
