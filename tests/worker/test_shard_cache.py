"""The bounded directory of fetched shards: whatever breaks on the way, what is in it is right and not too much."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from protocol.errors import Transient
from tests.support.file_server import FileServer, file_server
from tests.support.full_disk import small_disk
from tests.support.waiting import PATIENCE_S, wait_until
from worker.data.fetching.remote_files import HttpFiles
from worker.data.fetching.shard_cache import RemoteShard, ShardCache
from worker.errors import DataError, Stopped
from worker.line.retry import Retry

ROOT = Path(__file__).parents[2]
SIZE = 100_000


def content(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def retry(stop: threading.Event | None = None, slept: list[float] | None = None) -> Retry:
    """Tries again at once."""
    sleep = (lambda seconds: None) if slept is None else slept.append
    return Retry(stop or threading.Event(), sleep=sleep, rng=random.Random(0), peer="the data")


class Shelf:
    """Shards in memory, whose reading is noted, and breaks where a test says."""

    def __init__(self, **faults: list[Exception | int]) -> None:
        self.read: list[int] = []
        self.faults: dict[int, list[Exception | int]] = {int(name[1:]): each for name, each in faults.items()}

    def wanted(self, number: int, size: int = SIZE) -> RemoteShard:
        whole = content(number, size)

        def read() -> Iterator[bytes]:
            self.read.append(number)
            fault = self.faults.get(number, []).pop(0) if self.faults.get(number) else None
            if isinstance(fault, Exception):
                raise fault
            for at in range(0, size if fault is None else fault, 30_000):
                yield whole[at : at + 30_000]
            if fault is not None:
                raise Transient("the connection was cut")

        return RemoteShard(blake3(whole).hexdigest(), size, f"shard {number}", read)


def whole(cache: ShardCache, shard: RemoteShard, keep: Collection[str] = ()) -> bytes:
    with cache.open(shard, keep) as file:
        return file.read()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "lock")


def digests(*numbers: int) -> list[str]:
    return sorted(blake3(content(number)).hexdigest() for number in numbers)


def test_a_shard_is_fetched_once_and_is_there_for_the_next_process(tmp_path: Path) -> None:
    shelf = Shelf()
    for _ in range(2):
        cache = ShardCache(tmp_path / "deep" / "cache", 10 * SIZE, retry())
        for _ in range(2):
            assert whole(cache, shelf.wanted(1)) == content(1)
    assert shelf.read == [1]
    assert names(tmp_path / "deep" / "cache") == digests(1)


def test_a_try_that_broke_off_is_made_again(tmp_path: Path) -> None:
    shelf = Shelf(_1=[70_000, Transient("503"), 90_000])
    assert whole(ShardCache(tmp_path, 10 * SIZE, retry()), shelf.wanted(1)) == content(1)
    assert shelf.read == [1, 1, 1, 1]


def test_nobody_asks_for_a_shard_before_the_server_wants_to_be_asked(tmp_path: Path) -> None:
    """A second fetcher asked at once when it got the lock of the first, which waited for Retry-After."""
    shelf, stop = Shelf(_1=[Transient("429", retry_after_s=20)]), threading.Event()
    slept: list[float] = []

    def meanwhile(seconds: float) -> None:
        """The first waits for Retry-After, and the second comes."""
        slept.append(seconds)
        other = Retry(stop, sleep=lambda _: stop.set(), rng=random.Random(0))
        with pytest.raises(Stopped):
            ShardCache(tmp_path, 10 * SIZE, other).fetch(shelf.wanted(1))

    patient = Retry(threading.Event(), sleep=meanwhile, rng=random.Random(0))
    ShardCache(tmp_path, 10 * SIZE, patient).fetch(shelf.wanted(1))
    assert (shelf.read, slept) == ([1, 1], [20])
    assert names(tmp_path) == digests(1)


@pytest.mark.covers("security:changed-data", "security:hostile-data-server")
def test_an_altered_shard_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    good = Shelf().wanted(1)
    bad = RemoteShard(good.digest, SIZE, "https://there/train-1.bin", lambda: iter([content(2)]))
    with pytest.raises(DataError, match=r"https://there/train-1.bin .* was altered") as raised:
        ShardCache(tmp_path, 10 * SIZE, retry()).open(bad)
    assert digests(1)[0] in str(raised.value)
    assert digests(2)[0] in str(raised.value)
    assert not (tmp_path / good.digest).exists()
    assert whole(ShardCache(tmp_path, 10 * SIZE, retry()), good) == content(1)  # once it was put there again


def test_a_part_of_a_process_that_was_killed_is_fetched_anew(tmp_path: Path) -> None:
    """After a power failure a file may have the length that was written and other bytes."""
    shelf = Shelf()
    wanted = shelf.wanted(1)
    (tmp_path / f"{wanted.digest}.part").write_bytes(content(1)[:40_000] + bytes(2 * SIZE))
    assert whole(ShardCache(tmp_path, 10 * SIZE, retry()), wanted) == content(1)
    assert shelf.read == [1]


def test_a_spoilt_file_is_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    ShardCache(tmp_path, 10 * SIZE, retry()).fetch(shelf.wanted(1))
    (tmp_path / digests(1)[0]).write_bytes(content(1)[:-1] + b"?")
    assert whole(ShardCache(tmp_path, 10 * SIZE, retry()), shelf.wanted(1)) == content(1)
    assert shelf.read == [1, 1]
    assert "damaged; fetching it again" in caplog.text


def test_a_worker_that_is_asked_to_stop_stops_in_the_middle(tmp_path: Path) -> None:
    stop, shelf = threading.Event(), Shelf()
    wanted = shelf.wanted(1)

    def read() -> Iterator[bytes]:
        yield content(1)[:50_000]
        stop.set()
        yield content(1)[50_000:]

    with pytest.raises(Stopped):
        ShardCache(tmp_path, 10 * SIZE, retry(stop)).open(RemoteShard(wanted.digest, SIZE, "shard 1", read))
    assert names(tmp_path) == [f"{wanted.digest}.part"]
    ShardCache(tmp_path, 10 * SIZE, retry()).fetch(wanted)
    assert shelf.read == [1]


# --- the limit ----------------------------------------------------------------------------------------------------


def used_at(directory: Path, number: int, seconds: float) -> None:
    os.utime(directory / blake3(content(number)).hexdigest(), (seconds, seconds))


def test_room_is_made_of_what_was_used_longest_ago(tmp_path: Path) -> None:
    shelf, cache = Shelf(), ShardCache(tmp_path, 3 * SIZE + 10, retry())
    for number in (1, 2, 3):
        cache.fetch(shelf.wanted(number))
        used_at(tmp_path, number, 1000 + number)
    cache.open(shelf.wanted(1)).close()  # that is a use
    cache.fetch(shelf.wanted(4))
    assert names(tmp_path) == digests(1, 3, 4)


def test_what_is_still_needed_is_deleted_last(tmp_path: Path) -> None:
    shelf, cache = Shelf(), ShardCache(tmp_path, 3 * SIZE, retry())
    for number in (1, 2, 3):
        cache.fetch(shelf.wanted(number))
        used_at(tmp_path, number, 1000 + number)
    cache.fetch(shelf.wanted(4), digests(1, 2))
    assert names(tmp_path) == digests(1, 2, 4)
    assert whole(cache, shelf.wanted(5), digests(1, 2, 4)) == content(5)
    assert names(tmp_path) == digests(2, 4, 5)


def test_a_part_that_nobody_fetches_any_more_is_room_and_one_in_work_is_not(tmp_path: Path) -> None:
    shelf, cache = Shelf(), ShardCache(tmp_path, 2 * SIZE, retry())
    fetching, left, third = shelf.wanted(1), shelf.wanted(2), shelf.wanted(3)
    (tmp_path / f"{left.digest}.part").write_bytes(bytes(SIZE))

    def read() -> Iterator[bytes]:
        cache.fetch(third)  # in the middle of another one
        assert names(tmp_path) == sorted([f"{fetching.digest}.part", third.digest])
        yield content(1)

    cache.fetch(RemoteShard(fetching.digest, SIZE, "shard 1", read))
    assert names(tmp_path) == digests(1, 3)


def test_what_is_needed_at_once_waits_while_others_fetch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    first, second = shelf.wanted(1), shelf.wanted(2)
    begun, go_on = threading.Event(), threading.Event()

    def read() -> Iterator[bytes]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        yield content(1)

    def let_go(seconds: float) -> None:
        go_on.set()
        fetching.join(PATIENCE_S)

    other = Retry(threading.Event(), sleep=let_go, rng=random.Random(0), peer="the data")
    cache = ShardCache(tmp_path, SIZE, retry())
    fetching = threading.Thread(target=cache.fetch, args=(RemoteShard(first.digest, SIZE, "shard 1", read),))
    fetching.start()
    assert begun.wait(PATIENCE_S)
    assert whole(ShardCache(tmp_path, SIZE, other), second) == content(2)
    assert "has no room" in caplog.text
    assert names(tmp_path) == digests(2)


# --- several workers ----------------------------------------------------------------------------------------------


def test_workers_that_want_the_same_shard_fetch_it_once(tmp_path: Path) -> None:
    asked: list[bool] = []
    waiting = threading.Event()

    def read() -> Iterator[bytes]:
        asked.append(True)
        yield content(1)[:50_000]
        assert waiting.wait(PATIENCE_S)  # until the other one has found it locked
        yield content(1)[50_000:]

    wanted = RemoteShard(digests(1)[0], SIZE, "shard 1", read)
    patient = Retry(threading.Event(), sleep=lambda seconds: waiting.set(), peer="the data")

    def worker(_: int) -> bytes:
        with ShardCache(tmp_path, 10 * SIZE, patient).open(wanted) as file:
            return file.read()

    with ThreadPoolExecutor(3) as workers:
        assert list(workers.map(worker, range(3))) == [content(1)] * 3
    assert asked == [True]


@pytest.mark.slow
@pytest.mark.covers("reliability:remote-token-set")
def test_many_workers_in_a_small_directory_all_read_what_is_right(tmp_path: Path) -> None:
    """Each deletes what others have just fetched, or fetch."""
    limit, size = 5 * 4000, 4000

    def worker(seed: int) -> int:
        draw, shelf, most = random.Random(seed), Shelf(), 0
        cache = ShardCache(tmp_path, limit, retry())
        for _ in range(60):
            number = draw.randrange(12)
            assert whole(cache, shelf.wanted(number, size)) == content(number, size)
            with (tmp_path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                most = max(most, sum((tmp_path / name).stat().st_size for name in names(tmp_path)))
        return most

    with ThreadPoolExecutor(6) as workers:
        most = max(workers.map(worker, range(6)))
    assert size < most <= limit


FETCH = """
import sys, threading
from pathlib import Path
from tests.worker.test_shard_cache import SIZE, retry, served
from worker.data.fetching.shard_cache import ShardCache
ShardCache(Path(sys.argv[1]), 10 * SIZE, retry()).fetch(served(sys.argv[2]))
"""


def served(url: str) -> RemoteShard:
    """Shard 1 behind a server."""
    files = HttpFiles(url)
    return RemoteShard(digests(1)[0], SIZE, files.url("1.bin"), lambda: files.read("1.bin", 0, SIZE))


@pytest.mark.slow
@pytest.mark.covers("reliability:killed-fetch")
def test_who_is_killed_in_the_middle_leaves_nothing_wrong(tmp_path: Path) -> None:
    server = FileServer({"/1.bin": content(1)})
    held = threading.Event()
    cache = tmp_path / "cache"
    with file_server(server) as url:
        server.fault = lambda path: -60_000
        server.before = lambda path: None if server.count(path) == 1 else wait(held)
        process = subprocess.Popen(
            [sys.executable, "-c", FETCH, str(cache), url], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        wait_until(lambda: server.count("/1.bin") == 2)  # it has a part of it, and asks again
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert names(cache) == [f"{digests(1)[0]}.part"]
        server.fault, server.before = lambda path: None, lambda path: None
        held.set()
        assert whole(ShardCache(cache, 10 * SIZE, retry()), served(url)) == content(1)
    assert names(cache) == digests(1)


def wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


# --- disks --------------------------------------------------------------------------------------------------------


def test_on_a_full_disk_old_shards_make_room_and_then_it_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        shelf, directory = Shelf(), disk.root / "cache"
        cache = ShardCache(directory, 100 * SIZE, retry())
        for number in (1, 2):
            cache.fetch(shelf.wanted(number))
            used_at(directory, number, 1000 + number)
        disk.fill()
        slept = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 5:
                disk.make_room()

        waiting = Retry(threading.Event(), sleep=sleep, rng=random.Random(0), peer="the data")
        assert whole(ShardCache(directory, 100 * SIZE, waiting), shelf.wanted(3, 3 * SIZE)) == content(3, 3 * SIZE)
        assert len(slept) == 5
        assert f"the disk of the data cache {directory} is full" in caplog.text
        assert names(directory) == [blake3(content(3, 3 * SIZE)).hexdigest()]


def test_a_directory_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set OUTERSTEP_DATA_CACHE to another directory"):
        ShardCache(tmp_path / "file" / "cache", SIZE, retry())
