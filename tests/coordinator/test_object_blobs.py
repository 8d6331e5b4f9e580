"""Blobs in a bucket: local copies, large blobs, and what a store that fails makes of them."""

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from coordinator.backup.contents import Content, copy_whole
from coordinator.store.blobs import OwnedBucket, RunNames, StoreOutage
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import fault_of
from coordinator.store.payloads import fault_in
from coordinator.upkeep.storage import QUIET_S
from harness.coordinator import InThread, SettableClock
from harness.seaweedfs import SeaweedFS
from harness.stores import read
from protocol.digest import digest
from protocol.errors import OuterstepError
from protocol.messages import Cause
from tests.coordinator.crew import crew
from tests.support.waiting import PATIENCE_S, wait_until

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
pytest.importorskip("moto", reason="no S3 server for tests: pip install 'moto[s3]' flask flask-cors")

from coordinator.store.object_blobs import ObjectBlobs
from outerstep.common import objects
from outerstep.common.objects import Bucket, Objects
from tests.support.s3_server import BUCKET, S3Server

NAME = RunNames("r").contribution(1, 0, "w", bytes(32))
_numbers = itertools.count()


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDirectory]:
    with closing(DataDirectory(tmp_path / "data")) as data:
        yield data


@pytest.fixture
def prefix() -> str:
    return f"prefix-{next(_numbers)}"


@pytest.fixture
def blobs(s3: S3Server, data: DataDirectory, prefix: str) -> ObjectBlobs:
    return ObjectBlobs(owned(Objects(f"s3://{BUCKET}/{prefix}")), data, cache_bytes=4000)


def owned(objects: Objects) -> OwnedBucket:
    bucket = OwnedBucket.taken(objects, "its owner")
    assert bucket is not None
    return bucket


def copies(data: DataDirectory) -> list[int]:
    return sorted(file.stat().st_size for file in (data.root / "copies").iterdir())


def asked(s3: S3Server, method: str) -> int:
    return sum(request.method == method for request in s3.asked)


def gets(s3: S3Server, blobs: ObjectBlobs, name: str, content: bytes) -> int:
    """Read a blob, whose content is given; how often the store was asked for it."""
    s3.asked.clear()
    assert read(blobs, name) == content
    return asked(s3, "GET")


# --- local copies -----------------------------------------------------------------------------------------------------


def test_a_blob_is_downloaded_once_however_often_it_is_read(s3: S3Server, blobs: ObjectBlobs) -> None:
    content = os.urandom(1000)
    blobs.put(NAME, content)
    s3.asked.clear()
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda _: read(blobs, NAME), range(6))) == [content] * 6
    assert asked(s3, "GET") == 1


def test_local_copies_stay_within_their_limit(s3: S3Server, blobs: ObjectBlobs, data: DataDirectory) -> None:
    names = [f"runs/r/deltas/0/{number}" for number in range(6)]
    for name in names:
        blobs.put(name, bytes(900))
        read(blobs, name)
    assert copies(data) == [900] * 4
    assert gets(s3, blobs, names[5], bytes(900)) == 0
    assert gets(s3, blobs, names[0], bytes(900)) == 1, "its copy made room for others"
    blobs.delete(*names)
    assert copies(data) == []


def test_without_space_on_the_disk_no_copies_are_kept(
    blobs: ObjectBlobs, data: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(size: int) -> None:
        raise OSError("full")

    monkeypatch.setattr(data, "check_space", full)
    blobs.put(NAME, b"some bytes")
    assert read(blobs, NAME) == b"some bytes"
    assert copies(data) == []


def test_a_file_that_is_put_is_its_copy(s3: S3Server, blobs: ObjectBlobs, data: DataDirectory) -> None:
    source = data.scratch()
    source.write_bytes(b"some bytes")
    blobs.put(NAME, source)
    source.unlink()
    assert gets(s3, blobs, NAME, b"some bytes") == 0


def test_a_blob_is_examined_in_the_store_and_not_in_its_copy(s3: S3Server, blobs: ObjectBlobs, prefix: str) -> None:
    blobs.put(NAME, b"some bytes")
    assert read(blobs, NAME) == b"some bytes"
    s3.write(f"{prefix}/{NAME}", b"SOME bytes")
    assert read(blobs, NAME) == b"some bytes"
    assert fault_in(blobs, NAME, digest(b"some bytes")) == "corrupt"
    assert read(blobs, NAME) == b"SOME bytes", "the copy is gone"


def test_a_spoilt_copy_is_no_damage(blobs: ObjectBlobs, data: DataDirectory) -> None:
    """Otherwise an acknowledged contribution would be deleted because a local disk has flipped a bit."""
    blobs.put(NAME, b"some bytes")
    read(blobs, NAME)
    (copy,) = (data.root / "copies").iterdir()
    copy.write_bytes(b"SOME bytes")
    assert fault_in(blobs, NAME, digest(b"some bytes")) is None
    assert read(blobs, NAME) == b"some bytes"


# --- large blobs ------------------------------------------------------------------------------------------------------


def test_a_large_blob_goes_up_in_parts_and_only_once(
    s3: S3Server, blobs: ObjectBlobs, data: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MULTIPART_BYTES", 8 << 20)
    source = data.scratch()
    source.write_bytes(content := os.urandom((17 << 20) + 5))
    s3.asked.clear()
    assert blobs.put(NAME, source)
    sizes = [request.size for request in s3.asked if "partNumber=" in request.query]
    assert sorted(sizes) == [(1 << 20) + 5, 8 << 20, 8 << 20]
    assert not blobs.put(NAME, bytes(20 << 20))
    assert read(blobs, NAME) == content


# --- a store that fails -----------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_an_outage_and_not_a_lost_blob(
    s3: S3Server, blobs: ObjectBlobs, data: DataDirectory
) -> None:
    """A lost contribution is deleted and asked for again; a lost delta sends workers to a checkpoint."""
    blobs.put(NAME, b"some bytes")
    reader = blobs.open(NAME, fresh=True)
    s3.fault = lambda request: (503, "SlowDown")
    for attempt in (
        lambda: blobs.put("another", b""),
        lambda: blobs.open(NAME),
        lambda: reader.read_into(memoryview(bytearray(4)), 0),
        lambda: blobs.fetch(NAME, data.scratch()),
        lambda: blobs.stat(NAME),
        lambda: list(blobs.list("runs/")),
        lambda: blobs.delete(NAME),
        lambda: fault_in(blobs, NAME, bytes(32)),
    ):
        with pytest.raises(StoreOutage, match="the store answers 503") as raised:
            attempt()
        fault = fault_of(raised.value)
        assert fault is not None
        assert fault.cause is Cause.STORAGE_UNAVAILABLE
    s3.undisturbed()
    assert read(blobs, NAME) == b"some bytes"


def test_a_backup_during_an_outage_fails_and_takes_no_blob_for_lost(
    s3: S3Server, blobs: ObjectBlobs, tmp_path: Path
) -> None:
    """Otherwise it would be recorded as a backup without that blob, and older ones removed."""
    blobs.put(NAME, b"some bytes")
    content = Content(digest=digest(b"some bytes").hex(), size=len(b"some bytes"))
    with blobs.open(NAME, fresh=True) as reader:
        s3.fault = lambda request: (503, "SlowDown")
        with pytest.raises(StoreOutage):
            copy_whole(reader.read_into, tmp_path / "copy", content)
        assert not (tmp_path / "copy").exists()
        s3.undisturbed()
        assert copy_whole(reader.read_into, tmp_path / "copy", content)


def test_an_outage_of_the_bucket_is_named_and_ends_once_it_can_be_written(
    shared: InThread, clock: SettableClock, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew(shared, run, ["w"], rounds=1)
    coordinator, stored = shared.coordinator, shared.live(run).blobs

    def findings() -> list[tuple[str, str]]:
        with shared.client() as client:
            found = client.get("/v1/status").raise_for_status().json()
        assert found["database"]["fault"] == ""
        return [(each["about"], each["message"]) for each in found["findings"]]

    outage = StoreOutage("cannot write s3://b/p: the store answers 503")
    coordinator.storage.note(outage)
    assert ("bucket", str(outage)) in findings()

    asked = threading.Event()

    def fail(name: str, source: object) -> bool:
        asked.set()
        raise outage

    with monkeypatch.context() as patched:
        patched.setattr(stored, "put", fail)
        clock.advance(QUIET_S)
        coordinator.tick()
        assert asked.wait(PATIENCE_S)
    assert ("bucket", str(outage)) in findings()

    def over() -> bool:
        clock.advance(QUIET_S)
        coordinator.tick()
        return coordinator.storage.fault is None

    wait_until(over)
    assert findings() == []


def test_a_busy_store_is_asked_again(s3: S3Server, blobs: ObjectBlobs) -> None:
    refusals = iter([(503, "SlowDown")])
    s3.fault = lambda request: next(refusals, None)
    assert blobs.put(NAME, b"some bytes")
    assert read(blobs, NAME) == b"some bytes"


def test_a_put_whose_answer_was_lost_is_in_the_store(s3: S3Server, blobs: ObjectBlobs) -> None:
    lost = iter([(500, "InternalError")])
    s3.after = lambda request: next(lost, None) if request.method == "PUT" else None
    assert not blobs.put(NAME, b"some bytes"), "the second attempt finds the first one's object"
    assert read(blobs, NAME) == b"some bytes"


@pytest.mark.slow
def test_only_one_of_several_puts_creates_the_blob(store: SeaweedFS, data: DataDirectory, prefix: str) -> None:
    blobs = ObjectBlobs(owned(Objects(store.url(prefix))), data)
    contents = [bytes([number]) for number in range(6)]
    for name in (f"runs/r/deltas/{number}/0" for number in range(5)):
        with ThreadPoolExecutor(len(contents)) as threads:
            created = list(threads.map(partial(blobs.put, name), contents))
        assert [content for content, new in zip(contents, created, strict=True) if new] == [read(blobs, name)]


# --- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b", Bucket("s3", "b", "", None)),
        ("s3://b/a/prefix/", Bucket("s3", "b", "a/prefix", None)),
        ("gs://b/p", Bucket("gs", "b", "p", None)),
        ("s3+https://x.r2.cloudflarestorage.com/b/p", Bucket("s3", "b", "p", "https://x.r2.cloudflarestorage.com")),
        ("s3+http://127.0.0.1:8333/b", Bucket("s3", "b", "", "http://127.0.0.1:8333")),
    ],
)
def test_a_url_names_a_bucket_and_a_prefix(url: str, expected: Bucket) -> None:
    assert Bucket.of(url) == expected


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://", "names no bucket: use s3://BUCKET/PREFIX"),
        ("s3+https://host", r"names no bucket: use s3\+https://HOST/BUCKET/PREFIX"),
        ("ftp://b/p", "begins with one of s3://"),
        ("s3://key:secret@b/p", "has no key"),
        ("s3://b/p?acl", "has no key, query"),
    ],
)
def test_what_names_no_bucket_is_refused(url: str, reason: str) -> None:
    with pytest.raises(OuterstepError, match=reason) as raised:
        Bucket.of(url)
    assert "secret" not in str(raised.value)
