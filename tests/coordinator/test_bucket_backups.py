"""Backups in a bucket, by the protocol of S3: what is in it, two at once, what is spoilt there, what the line does."""

import itertools
import os
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coordinator.backup.create import BackupSource, create
from coordinator.backup.locations import open_existing, open_store
from coordinator.backup.manifest import Content
from coordinator.backup.restore import restore
from coordinator.backup.store import BackupInterrupted, content_of, never_interrupt
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.blobs import FileReader
from coordinator.store.opening import reader_of
from harness.coordinator import SettableClock, coordinator_thread
from protocol.digest import digest
from protocol.errors import OuterstepError, Transient
from tests.coordinator.crew import crew, play_round
from tests.support.backing_up import back_up, check_restored, damages
from tests.support.waiting import wait_until

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
pytest.importorskip("moto", reason="no S3 server for tests: pip install 'moto[s3]' flask flask-cors")

from coordinator.backup import bucket_lock
from coordinator.backup.bucket import BackupBucket
from outerstep.common import objects
from tests.support.s3_server import BUCKET, Request, S3Server

SHORT = "every_rounds = 1\nkeep = 1"
_numbers = itertools.count()


@pytest.fixture
def prefix() -> str:
    return f"prefix-{next(_numbers)}"


@pytest.fixture
def url(s3: S3Server, prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Data directories of one run at its states 0, 1 and 2, of which no two share a checkpoint."""
    folder = tmp_path_factory.mktemp("states")
    found = [folder / f"state-{round_}" for round_ in range(3)]
    with coordinator_thread(folder / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=3, checkpoints=SHORT)
        for round_, state in enumerate(found):
            running.await_state("r", round_)
            back_up(running.data_dir, folder / "backups")
            restore(open_store(folder / "backups"), None, state)
            play_round([a], round_)
    return found


def spoilt(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def only_in_2(url: str) -> list[str]:
    first, second = ({blob.digest for blob in open_store(url).manifest(n).blobs} for n in (1, 2))
    return sorted(second - first)


@pytest.fixture
def two(url: str, states: list[Path]) -> str:
    """A bucket with backups 1, of state 0, and 2, of state 1."""
    back_up(states[0], url)
    back_up(states[1], url)
    return url


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_what_is_new_goes_up_the_newest_stay_and_each_is_restored(
    s3: S3Server, url: str, prefix: str, states: list[Path], tmp_path: Path
) -> None:
    first = back_up(states[0], url, keep=2)
    assert first.copied_blobs == len(first.manifest.blobs) > 0
    assert s3.keys(f"{prefix}/blobs/") == {blob.digest for blob in first.manifest.blobs}
    assert (back_up(states[0], url, keep=2).copied_blobs, open_store(url).numbers()) == (0, [2, 1])
    last = [back_up(states[round_], url, keep=2) for round_ in (1, 2)]
    assert [made.removed for made in last] == [[1], [2]]
    assert damages(url) == {4: "", 3: ""}
    assert s3.keys(f"{prefix}/blobs/") == {blob.digest for made in last for blob in made.manifest.blobs}
    kept = {(made.manifest.number, made.manifest.database.digest) for made in last}
    names = {name for number, digest in kept for name in (f"{number}.json", f"{number}.{digest}.db")}
    assert s3.keys(f"{prefix}/backups/") == names
    for made in last:
        new = tmp_path / f"new-{made.manifest.number}"
        manifest = restore(open_existing(url), made.manifest.number, new)
        assert manifest == made.manifest
        check_restored(new, manifest)


def test_the_coordinator_backs_itself_up_to_a_url(s3: S3Server, url: str, tmp_path: Path) -> None:
    clock = SettableClock()
    settings: dict[str, Any] = {"backup_dir": url, "backup_every_s": 3600.0}
    with coordinator_thread(tmp_path / "data", clock=clock, **settings) as running:
        wait_until(lambda: running.coordinator.last_backup_at is not None)
        made_at = running.coordinator.last_backup_at
    with coordinator_thread(tmp_path / "data", clock=clock, **settings) as running:
        wait_until(lambda: running.coordinator.last_backup_at == made_at)
    assert damages(url) == {1: ""}


def test_a_large_object_goes_up_and_comes_down_in_parts(s3: S3Server, url: str, prefix: str, tmp_path: Path) -> None:
    content = os.urandom(2 * objects.PART_BYTES + 77)
    (tmp_path / "blob").write_bytes(content)
    name = digest(content).hex()
    bucket = BackupBucket(url)
    with bucket.locked(), FileReader(tmp_path / "blob") as reader:
        s3.asked.clear()
        assert bucket.take_blob(reader, name, never_interrupt)
        assert bucket.holds(Content(digest=name, size=len(content)))
        sizes = [request.size for request in s3.asked if "partNumber" in request.query]
        assert sorted(sizes) == [77, objects.PART_BYTES, objects.PART_BYTES]
        assert not bucket.take_blob(reader, "0" * 64, never_interrupt), "another digest"
    assert s3.keys(f"{prefix}/blobs/") == {name}
    assert "Uploads" not in s3.client().list_multipart_uploads(Bucket=BUCKET), "none is left half"
    s3.asked.clear()
    with bucket.open_blob(name) as reader:
        memory = memoryview(bytearray(objects.PART_BYTES + 5))
        assert reader.read_into(memory, 3) == len(memory)
        assert bytes(memory) == content[3 : 3 + len(memory)]
        assert reader.read_into(memory, len(content) - 7) == 7
        assert bytes(memory[:7]) == content[-7:]
        assert reader.read_into(memory, len(content)) == 0
    assert [request.method for request in s3.asked] == ["HEAD", "GET", "GET", "GET"]


def test_an_interrupted_upload_leaves_nothing_and_the_next_one_goes_on(
    s3: S3Server, url: str, prefix: str, states: list[Path]
) -> None:
    going = threading.Event()

    def interrupt() -> None:
        if going.is_set():
            raise BackupInterrupted

    def stop(request: Request) -> None:
        if "blobs/" in request.path:
            going.set()

    s3.after = stop
    source = BackupSource(sqlite.url_in(states[0]), reader_of(states[0]))
    with pytest.raises(BackupInterrupted):
        create(source, open_store(url), 1, interrupt=interrupt)
    assert len(s3.keys(f"{prefix}/blobs/")) == 1
    s3.undisturbed()
    made = back_up(states[0], url)
    assert made.copied_blobs == len(made.manifest.blobs) - 1


# --- two at once ------------------------------------------------------------------------------------------------------


class Time:
    """What clocks say."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_two_backups_at_once_are_refused_with_who_and_until_when(url: str, states: list[Path]) -> None:
    with BackupBucket(url, Time(1_800_000_000.0)).locked():
        # LEASE_S, and as much more as clocks differ.
        told = rf"in {url}, by \S+, process {os.getpid()}: wait until it is done.*after 2027-01-15 08:11:00 UTC"
        with pytest.raises(OuterstepError, match=told), BackupBucket(url, Time(1_800_000_659.0)).locked():
            pass
    assert back_up(states[0], url).manifest.number == 1, "it was given back"


def test_a_lock_is_renewed_while_it_is_held(
    s3: S3Server, url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lock, "RENEW_S", 0.01)
    time = Time(1000.0)
    with BackupBucket(url, time).locked():
        time.now = 5000.0
        wait_until(lambda: b'"until":5600.0' in s3.read(f"{prefix}/lock"))
        with pytest.raises(OuterstepError, match="another backup is being made"), BackupBucket(url, time).locked():
            pass
    assert b'"until":0.0' in s3.read(f"{prefix}/lock")


def test_a_renewal_of_which_the_answer_is_lost_is_one(s3: S3Server, url: str, prefix: str) -> None:
    time = Time(1000.0)
    held = bucket_lock.BucketLock(objects.Objects(url), time)
    with held.held():
        s3.after = lambda request: (503, "SlowDown") if request.method == "PUT" else None
        time.now = 1100.0
        with pytest.raises(Transient):
            held.renew()
        s3.undisturbed()
        time.now = 1200.0
        held.renew()
        assert b'"until":1800.0' in s3.read(f"{prefix}/lock")
    assert b'"until":0.0' in s3.read(f"{prefix}/lock")


def test_a_lock_that_somebody_removed_is_lost(s3: S3Server, url: str, prefix: str) -> None:
    held = bucket_lock.BucketLock(objects.Objects(url), Time(1000.0))
    with held.held():
        s3.client().delete_object(Bucket=BUCKET, Key=f"{prefix}/lock")
        with pytest.raises(OuterstepError, match=f"another backup has taken the lock {url}/lock"):
            held.renew()
    assert s3.keys(f"{prefix}/") == set()


@pytest.mark.covers("reliability:bucket-backup-killed")
def test_who_was_stopped_for_long_does_no_harm_to_who_took_over(
    url: str, states: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first is about to name in a manifest, the second has removed."""
    monkeypatch.setattr(bucket_lock, "RENEW_S", 1e6)  # it was stopped, and with it the thread
    manifest = back_up(states[0], url).manifest
    first = BackupBucket(url, Time(1000.0))
    second = BackupBucket(url, Time(1000.0 + bucket_lock.LEASE_S + bucket_lock.CLOCKS_S))
    with first.locked():
        assert all(first.holds(blob) for blob in manifest.blobs)
        database = first.scratch()
        shutil.copy(states[0] / sqlite.FILE, database)
        made = create(BackupSource(sqlite.url_in(states[2]), reader_of(states[2])), second, keep=1)
        assert (made.manifest.number, made.removed) == (2, [1])
        with pytest.raises(OuterstepError, match="another backup has taken the lock"):
            first.add(
                manifest.model_copy(update={"number": 3, "database": content_of(database)}), database, never_interrupt
            )
    assert damages(url) == {2: ""}
    check_restored(tmp_path / "new", restore(open_store(url), None, tmp_path / "new"))
    assert back_up(states[1], url).manifest.number == 3, "nothing holds the lock"


def test_who_cannot_renew_the_lock_removes_nothing(s3: S3Server, two: str, prefix: str) -> None:
    time = Time(1000.0)
    bucket = BackupBucket(two, time)
    there = s3.keys(f"{prefix}/blobs/")
    with bucket.locked():
        time.now += bucket_lock.LEASE_S - bucket_lock.MARGIN_S + 1
        with pytest.raises(OuterstepError, match="could not be renewed in time"):
            bucket.remove_blobs(bucket.digests())
    assert s3.keys(f"{prefix}/blobs/") == there


def test_a_number_is_taken_once(two: str, states: list[Path]) -> None:
    bucket = BackupBucket(two)
    manifest = bucket.manifest(2)
    with bucket.locked():
        database = bucket.scratch()
        with bucket.open_database(manifest) as reader:
            memory = memoryview(bytearray(reader.size))
            database.write_bytes(memory[: reader.read_into(memory, 0)])
        with pytest.raises(OuterstepError, match=r"another backup .*/backups/2\.json"):
            bucket.add(manifest.model_copy(update={"made_at": 1.0}), database, never_interrupt)
    assert bucket.manifest(2) == manifest


def test_a_store_that_heeds_no_conditions_is_refused(s3: S3Server, url: str, states: list[Path]) -> None:
    s3.deaf = True
    with pytest.raises(OuterstepError, match="ignores `If-None-Match`"):
        back_up(states[0], url)


def test_a_lock_that_is_none_is_left_alone(s3: S3Server, url: str, prefix: str, states: list[Path]) -> None:
    s3.write(f"{prefix}/lock", b"mine")
    with pytest.raises(OuterstepError, match="is not a lock of Outerstep"):
        back_up(states[0], url)
    assert s3.read(f"{prefix}/lock") == b"mine"


# --- damage -----------------------------------------------------------------------------------------------------------


def test_what_is_spoilt_in_the_bucket_is_found_and_an_older_backup_restored(
    s3: S3Server, two: str, prefix: str, tmp_path: Path
) -> None:
    blob = only_in_2(two)[0]
    key = f"{prefix}/blobs/{blob}"
    s3.write(key, spoilt(s3.read(key)))
    told = damages(two)
    assert told[2].startswith(f"{two}/blobs/{blob} is missing or damaged (runs/r/")
    assert told[1] == ""
    said: list[str] = []
    manifest = restore(open_store(two), None, tmp_path / "new", said.append)
    assert (manifest.number, said) == (
        1,
        [f"backup 2 is damaged, trying an older one: {two}/blobs/{blob} is damaged"],
    )
    check_restored(tmp_path / "new", manifest)
    s3.client().delete_object(Bucket=BUCKET, Key=key)
    assert damages(two)[2].startswith(f"{two}/blobs/{blob} is missing or damaged")


def test_a_spoilt_database_and_a_spoilt_manifest_are_found(
    s3: S3Server, two: str, prefix: str, states: list[Path], tmp_path: Path
) -> None:
    name = BackupBucket(two).database_name(open_store(two).manifest(2))
    for key in (name.removeprefix(f"s3://{BUCKET}/"), f"{prefix}/backups/1.json"):
        s3.write(key, spoilt(s3.read(key)))
    assert damages(two) == {2: f"{name} is missing or damaged", 1: "its manifest is not what was written"}
    with pytest.raises(OuterstepError, match="every backup in"):
        restore(open_store(two), None, tmp_path / "new")
    before = s3.keys(f"{prefix}/blobs/")
    back_up(states[2], two, keep=1)
    assert before < s3.keys(f"{prefix}/blobs/"), "what cannot be read may need any of them"


def test_a_cut_blob_is_copied_anew(s3: S3Server, two: str, prefix: str, states: list[Path]) -> None:
    key = f"{prefix}/blobs/{only_in_2(two)[0]}"
    s3.write(key, s3.read(key)[:-1])
    assert back_up(states[1], two).copied_blobs == 1
    assert set(damages(two).values()) == {""}


# --- the line ---------------------------------------------------------------------------------------------------------


def test_a_line_that_is_cut_is_no_damage(s3: S3Server, two: str, tmp_path: Path) -> None:
    blob = only_in_2(two)[0]
    s3.fault = lambda request: (503, "SlowDown") if blob in request.path and request.method == "GET" else None
    for does in (lambda: damages(two), lambda: restore(open_store(two), None, tmp_path / "new")):
        with pytest.raises(Transient, match=f"cannot read {two}/blobs/{blob}: the store answers 503"):
            does()
    s3.undisturbed()
    check_restored(tmp_path / "new", restore(open_store(two), None, tmp_path / "new"))


def test_an_answer_that_is_lost_is_no_refusal(s3: S3Server, url: str, states: list[Path]) -> None:
    """A try that had its effect is made again, and meets what it made itself."""
    tries: Counter[str] = Counter()

    def lose(request: Request) -> tuple[int, str] | None:
        tries[request.path] += request.method == "PUT"
        return (503, "SlowDown") if tries[request.path] % 2 else None

    s3.after = lose
    assert back_up(states[0], url).manifest.number == 1
    assert {path.rpartition("/")[2] for path in tries} > {"lock", "1.json"}
    s3.undisturbed()
    assert damages(url) == {1: ""}


def test_a_fault_in_the_middle_leaves_what_was_there_and_the_next_one_goes_on(
    s3: S3Server, url: str, states: list[Path]
) -> None:
    back_up(states[0], url)
    s3.fault = lambda request: (500, "InternalError") if request.path.endswith("2.json") else None
    with pytest.raises(Transient, match=r"cannot write .*/backups/2\.json"):
        back_up(states[1], url, keep=1)
    assert damages(url) == {1: ""}
    s3.undisturbed()
    made = back_up(states[1], url, keep=1)
    assert (made.copied_blobs, made.removed, damages(url)) == (0, [1], {2: ""})


@pytest.mark.parametrize(
    ("method", "answer", "told"),
    [
        (
            "PUT",
            (403, "SignatureDoesNotMatch"),
            "this machine may not write {url}/lock (403 SignatureDoesNotMatch): ",
        ),
        (
            "GET",
            (403, "AccessDenied"),
            "this machine may not list {url} (403 AccessDenied): check that the key in AWS_AC",
        ),
        (
            "GET",
            (400, "AuthorizationHeaderMalformed"),
            "the bucket of {url} is in another region than the request: set ",
        ),
        (
            "GET",
            (301, "PermanentRedirect"),
            "the bucket of {url} is in another region than the request: set AWS_REGION",
        ),
        ("PUT", (400, "InvalidRequest"), "cannot write {url}/lock: the store answers 400 InvalidRequest"),
    ],
)
def test_what_another_try_does_not_mend_is_told_with_what_to_look_at(
    s3: S3Server, url: str, states: list[Path], method: str, answer: tuple[int, str], told: str
) -> None:
    s3.fault = lambda request: answer if request.method == method else None
    with pytest.raises(OuterstepError) as caught:
        back_up(states[0], url)
    assert told.format(url=url) in str(caught.value)
    assert not isinstance(caught.value, Transient)


def test_an_upload_that_the_bucket_has_dropped_may_be_tried_again(s3: S3Server, url: str, tmp_path: Path) -> None:
    content = bytes(objects.PART_BYTES + 1)
    (tmp_path / "blob").write_bytes(content)
    s3.fault = lambda request: (404, "NoSuchUpload") if "partNumber" in request.query else None
    bucket = BackupBucket(url)
    with (
        bucket.locked(),
        FileReader(tmp_path / "blob") as reader,
        pytest.raises(Transient, match=r"the parts of .* were removed"),
    ):
        bucket.take_blob(reader, digest(content).hex(), never_interrupt)


def test_where_there_are_no_credentials_the_variables_are_named(
    s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # which machines of a cloud have
    with pytest.raises(OuterstepError, match=f"no credentials for {url}: set AWS_ACCESS_KEY_ID"):
        open_existing(url)
    with pytest.raises(OuterstepError, match="no credentials for az://a/b: set AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://a/b")


def test_a_bucket_that_is_not_there_is_told(s3: S3Server, states: list[Path]) -> None:
    for does in (lambda url: back_up(states[0], url), open_existing):
        with pytest.raises(OuterstepError, match="there is no bucket 'nowhere' for s3://nowhere/a"):
            does("s3://nowhere/a")
    with pytest.raises(OuterstepError, match="s3:///a names no bucket"):
        open_store("s3:///a")


def test_where_nobody_answers_another_try_may_help(
    s3: S3Server, url: str, states: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        Transient, match=f"cannot list {url}: nothing answers at http://127.0.0.1:1 .*: check that it can be"
    ):
        back_up(states[0], url)


def test_where_no_backup_is_it_says_so(s3: S3Server, url: str, prefix: str, states: list[Path]) -> None:
    with pytest.raises(
        OuterstepError, match=f"there is no backup in {url}: `outerstep coordinator backup {url}` makes"
    ):
        open_existing(url)
    s3.write(f"{prefix}/letter", b"")
    with pytest.raises(OuterstepError, match=f"{url} has other objects"):
        back_up(states[0], url)
    assert s3.keys(f"{prefix}/") == {"letter"}


def test_without_obstore_the_line_to_type_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "coordinator.backup.bucket")
    monkeypatch.delitem(sys.modules, "outerstep.common.objects")
    monkeypatch.delitem(sys.modules, "coordinator.backup.bucket_lock")
    monkeypatch.setitem(sys.modules, "obstore", None)
    import coordinator.backup

    monkeypatch.delattr(coordinator.backup, "bucket")
    with pytest.raises(OuterstepError, match=r"needs obstore: pip install 'outerstep\[coordinator,remote\]'"):
        Coordinator(Settings(data_dir=tmp_path / "data", backup_dir="s3://bucket/backups"))
