"""A token set behind a URL is the same training set as in a directory, whatever the line and the disk do."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch

from harness.coordinator import InThread, coordinator_thread
from outerstep.common.exit_codes import Exit
from protocol.messages import RunDetail
from protocol.spec.run import RunSpec, parse_spec
from tests.support.file_server import FileServer, file_server
from tests.support.token_sets import write_token_set
from tests.support.waiting import wait_until
from tests.support.workers import worker_settings
from worker.agent import run_worker
from worker.data.fetching.prefetching import THREADS
from worker.data.fetching.remote_set import CacheSettings, open_remote_set
from worker.data.open_training_set import open_training_set
from worker.data.tokens.index import Index
from worker.data.training_set import TrainingSet
from worker.errors import DataError, Stopped

SHARDS, TOKENS = 40, 1001  # five windows of eight shards; ten sequences of 100 tokens in a shard
BYTES = 2 * TOKENS
UNITS = SHARDS * 10 // 4


def toml(source: str) -> str:
    return f"""
name = "r"
[model]
preset = "tiny"
[data]
source = "{source}"
sequence_length = 100
[inner]
batch_size = 4
[sync]
wait = "always"
rounds = 2
inner_steps = 5
"""


def spec(source: str) -> RunSpec:
    return parse_spec(toml(source))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_token_set(tmp_path / "set", shards=SHARDS, tokens=TOKENS, held_out=6)
    return tmp_path / "set"


@pytest.fixture
def server(directory: Path) -> FileServer:
    return FileServer({f"/sets/one/{path.name}": path.read_bytes() for path in directory.iterdir()})


@pytest.fixture
def url(server: FileServer) -> Iterator[str]:
    with file_server(server) as url:
        yield url


Opened = Callable[..., TrainingSet]


@pytest.fixture
def opened(url: str, tmp_path: Path) -> Iterator[Opened]:
    """Opens the served set, in a cache for so many shards; at the end nothing is fetched any more."""
    with ExitStack() as closed:

        def opened(*, shards: int = 20, stop: threading.Event | None = None) -> TrainingSet:
            settings = CacheSettings(tmp_path / "cache", shards * BYTES)
            data = open_remote_set(spec(f"{url}/sets/one"), None, settings, stop or threading.Event())
            return closed.enter_context(closing(data))

        yield opened


def units(data: TrainingSet, numbers: range) -> list[torch.Tensor]:
    return [data.unit(number) for number in numbers]


def final_digest(coordinator: InThread) -> str | None:
    with coordinator.client() as http:
        return RunDetail.model_validate(http.get("/v1/runs/r").json()).state_digest


@pytest.mark.covers("reliability:remote-token-set")
def test_units_and_held_out_batches_are_those_of_the_same_set_in_a_directory(
    server: FileServer, directory: Path, opened: Opened, tmp_path: Path
) -> None:
    """In less room than the set takes, and never in more."""
    local, most = open_training_set(spec(str(directory))), 0

    def look(path: str) -> None:
        nonlocal most
        most = max(most, sum(file.stat().st_size for file in (tmp_path / "cache").glob("?" * 64)))

    server.before = look
    remote = opened()
    assert (remote.summary, remote.units_per_epoch) == (local.summary, local.units_per_epoch)
    assert (remote.vocabulary, remote.bytes_per_token) == (local.vocabulary, local.bytes_per_token)
    for unit in range(UNITS):
        assert torch.equal(remote.unit(unit), local.unit(unit))
    both = zip(remote.held_out_batches(2000), local.held_out_batches(2000), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in both)
    asked = {path: server.count(path) for path in server.files if "train" in path}
    assert set(asked.values()) == {1}, "each shard is fetched once in an epoch"
    assert 10 * BYTES < most <= 20 * BYTES


def test_only_the_held_out_shards_that_are_read_are_fetched(server: FileServer, opened: Opened) -> None:
    remote = opened()
    assert sum(len(batch) for batch in remote.held_out_batches(2 * 100)) == 2
    assert sorted(path for path, _ in server.asked) == [
        "/sets/one/held-out-0.bin",
        "/sets/one/held-out-3.bin",
        "/sets/one/index.json",
    ]


def asked(server: FileServer) -> set[str]:
    return {path for path, _ in server.asked if "train" in path}


def test_no_thread_goes_on_fetching_for_a_set_that_is_closed(server: FileServer, opened: Opened) -> None:
    """Threads that waited for the server of another test wrote of it into the log of the last one."""
    others = set(threading.enumerate())
    data = opened()
    server.fault = lambda path: 503
    data.expect(range(20))
    wait_until(lambda: len(asked(server)) == THREADS)
    data.close()
    wait_until(lambda: set(threading.enumerate()) <= others)


def test_a_server_that_knows_no_ranges_will_do(server: FileServer, directory: Path, opened: Opened) -> None:
    server.ranges = False
    cut = {"/sets/one/train-3.bin": 1}

    def fault(path: str) -> int | None:
        cut[path] = cut.get(path, 0) - 1
        return -700 if cut[path] == 0 else None  # the first answer is cut

    server.fault = fault
    local = open_training_set(spec(str(directory)))
    remote = opened(shards=SHARDS)
    window = next(range(w * 20, w * 20 + 20) for w in range(5) if 3 in remote.order.shards(w * 20))
    assert all(torch.equal(remote.unit(unit), local.unit(unit)) for unit in window)
    assert server.count("/sets/one/train-3.bin") == 2


# --- what is wrong for good ---------------------------------------------------------------------------------------


def first_shard(data: TrainingSet) -> str:
    return f"train-{data.order.shards(0)[0]}.bin"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: None, r"does not exist \(404\)"),
        (lambda content: content[:-10], r"has 1992 bytes, .* 2002"),
        (lambda content: content[:-1] + b"?", r"BLAKE3 .* it was altered"),
    ],
)
def test_a_shard_that_is_missing_cut_or_altered_is_told_where_it_is_needed(
    server: FileServer, url: str, opened: Opened, spoil, said: str
) -> None:
    name = first_shard(opened())
    path = f"/sets/one/{name}"
    spoilt = spoil(server.files[path])
    if spoilt is None:
        del server.files[path]
    else:
        server.files[path] = spoilt
    data = opened()
    data.expect(range(5))
    with pytest.raises(DataError, match=said) as raised:
        units(data, range(20))
    assert f"{url}/sets/one/{name}" in str(raised.value)


@pytest.mark.parametrize(
    ("status", "said"),
    [(403, "403: .* make it public"), (401, "HF_TOKEN"), (404, "does not exist"), (418, "does not exist")],
)
def test_a_set_that_may_not_be_read_is_told_at_once(server: FileServer, opened: Opened, status: int, said: str) -> None:
    server.fault = lambda path: status
    with pytest.raises(DataError, match=said):
        opened()


def test_an_index_that_is_none_is_told_at_once(server: FileServer, opened: Opened) -> None:
    server.files["/sets/one/index.json"] = b"<html>Sign in to the Wi-Fi"
    with pytest.raises(DataError, match="index.json is not the index of a token set"):
        opened()


def test_a_cache_that_is_too_small_is_told_before_anything_is_fetched(server: FileServer, opened: Opened) -> None:
    with pytest.raises(DataError, match="up to 16 shards of this set, 3.2e-05 GB.* OUTERSTEP_DATA_CACHE_GB"):
        opened(shards=15)
    assert asked(server) == set()


def test_a_cache_without_room_for_what_is_held_out_is_told_at_the_start(server: FileServer, opened: Opened) -> None:
    """The first evaluation waited for room that no other worker could make."""
    index = Index.model_validate_json(server.files["/sets/one/index.json"])
    large = index.held_out[0].model_copy(update={"tokens": 30 * TOKENS})
    changed = index.model_copy(update={"held_out": [large]})
    server.files["/sets/one/index.json"] = changed.text().encode()
    with pytest.raises(DataError, match="an evaluation needs a shard of this set, 6.01e-05 GB"):
        opened()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("https://host:port/set", "index.json cannot be fetched: Invalid port: 'port'"),
        ("hf://datasets/only", "hf://datasets/NAME/SET"),
    ],
)
def test_an_address_that_is_none_is_told(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_remote_set(spec(source), None, CacheSettings(tmp_path), threading.Event())


# --- the line -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_is_away_is_waited_for(
    server: FileServer, url: str, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answers = iter([503, 429])
    server.fault = lambda path: next(answers, None)
    opened().unit(0)
    assert "answers 503; retrying in" in caplog.text
    assert f"data.source = '{url}/sets/one' answers again after" in caplog.text


def test_a_worker_that_is_asked_to_stop_does_not_wait_for_the_line(server: FileServer, opened: Opened) -> None:
    stop = threading.Event()
    data = opened(stop=stop)
    server.fault = lambda path: 503
    server.before = lambda path: stop.set()
    with pytest.raises(Stopped):
        data.unit(0)


# --- other addresses ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_repository_of_the_hub(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    base = "/datasets/team/c4/resolve/v2/gpt2"
    server.files = {path.replace("/sets/one", base): content for path, content in server.files.items()}
    with file_server(server) as url:
        monkeypatch.setattr(huggingface_hub, "hf_hub_url", partial(huggingface_hub.hf_hub_url, endpoint=url))
        source = "hf://datasets/team/c4@v2/gpt2"
        data = open_remote_set(spec(source), None, CacheSettings(tmp_path / "cache"), threading.Event())
        data.unit(0)
        server.fault = lambda path: 404
        with pytest.raises(DataError, match="hf://datasets/team/c4@v2/gpt2/train-"):
            units(data, range(UNITS))
    assert set(server.authorizations) == {"Bearer hf_secret"}


@pytest.mark.slow
def test_an_object_store(server: FileServer, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
    local = open_training_set(spec(str(directory)))
    server.files = {path.replace("/sets", "/bucket/sets"): content for path, content in server.files.items()}
    with file_server(server) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        settings = CacheSettings(tmp_path / "cache")
        data = open_remote_set(spec("s3://bucket/sets/one"), None, settings, threading.Event())
        assert torch.equal(data.unit(0), local.unit(0))
        by_its_address = f"s3+{url}/bucket/sets/one"
        again = open_remote_set(spec(by_its_address), None, CacheSettings(tmp_path / "b"), threading.Event())
        assert torch.equal(again.unit(0), local.unit(0))
        late = data.order.shards(UNITS - 1)
        server.files[f"/bucket/sets/one/train-{late[0]}.bin"] = b"short"
        del server.files[f"/bucket/sets/one/train-{late[1]}.bin"]
        with pytest.raises(DataError, match=r"s3://bucket/sets/one/train-\d+.bin (has 5 bytes|does not exist)"):
            units(data, range(UNITS - 20, UNITS))


def test_without_obstore_the_line_to_type_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "outerstep.common.objects", raising=False)
    with pytest.raises(DataError, match=r"needs obstore: pip install 'outerstep\[remote\]'"):
        open_remote_set(spec("s3://bucket/set"), None, CacheSettings(tmp_path), threading.Event())


# --- a run --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_ends_in_the_same_parameters_wherever_its_set_is(tmp_path: Path) -> None:
    index: Index = write_token_set(tmp_path / "set", shards=SHARDS, tokens=TOKENS, vocabulary=256)
    server = FileServer({f"/set/{path.name}": path.read_bytes() for path in (tmp_path / "set").iterdir()})
    digests = []
    with file_server(server) as url:
        for number, source in enumerate((str(tmp_path / "set"), f"{url}/set")):
            with coordinator_thread(tmp_path / f"coordinator-{number}") as coordinator:
                coordinator.create_run(toml(source))
                cache = {"data_cache": tmp_path / "cache", "data_cache_gb": 1.0}
                settings = worker_settings(coordinator, "r", tmp_path / f"state-{number}", **cache)
                assert run_worker(settings) == Exit.DONE
                wait_until(lambda: all(thread.name != "fetch" for thread in threading.enumerate()))
                wait_until(lambda: final_digest(coordinator) is not None)
                digests.append(final_digest(coordinator))
    assert digests[0] == digests[1]
    assert {path.name for path in (tmp_path / "cache").glob("?" * 64)} <= {shard.digest for shard in index.shards}
