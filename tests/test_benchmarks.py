"""The benchmarks of lines, of the control plane and of preparing, at sizes that say nothing about speed: what they print is complete.
And how all of them are named."""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, loop, prepare, wan
from benchmarks.control_plane import measure
from benchmarks.floor import core_seconds
from benchmarks.harness import lines
from benchmarks.harness.coordinator import coordinator_process
from benchmarks.line import SlowLine
from protocol.wire import CHUNK_ELEMENTS

ROOT = Path(__file__).parents[1]


def test_pages_name_benchmarks_as_they_are_run() -> None:
    """As modules: as a file, one finds its neighbours only where the project is installed."""
    sources = {f"benchmarks.{path.stem}": path for path in (ROOT / "benchmarks").glob("*.py")}
    for package in ("convergence", "peers"):
        sources[f"benchmarks.{package}"] = ROOT / "benchmarks" / package / "__main__.py"
    texts = {name: path.read_text() for name, path in sources.items()}
    pages = [path.read_text() for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"))]
    everything = "\n".join([*texts.values(), *pages])
    assert not re.search(r"python3? benchmarks/", everything)
    run = {name for name, text in texts.items() if "__main__" in text}
    assert set(re.findall(r"python3? -m (benchmarks\.\w+)", everything)) == run - {
        "benchmarks.wan_worker",
        "benchmarks.loop_ranks",
    }


def test_the_floor_of_a_sync_has_core_seconds_for_every_part() -> None:
    parts = core_seconds(2 * CHUNK_ELEMENTS + 5, 3)
    assert set(parts) == {"encode", "average", "outer step", "digests", "sockets", "disk"}
    assert all(seconds > 0 for seconds in parts.values())


def test_what_a_sync_costs_a_gpu_is_measured() -> None:
    found = gpu.measure("int8", 2 * CHUNK_ELEMENTS + 5, torch.device("cpu"))
    assert [each.operation for each in found] == ["quantise", "to the host", "outer step", "to the GPU"]
    assert all(each.seconds > 0 and each.share > 0 for each in found)


def test_preparing_is_measured_beside_datasets_where_that_is_installed() -> None:
    report = prepare.measure(300_000, processes=1, repeats=1)
    assert report["text_bytes"] >= 300_000
    there = importlib.util.find_spec("datasets") is not None
    assert set(report["seconds"]) == set(report["tokens"]) == {"outerstep", *(["datasets"] if there else [])}
    counts = list(report["tokens"].values())
    assert 50_000 < min(counts) <= max(counts) < min(counts) + 10, "but for where a long document is cut"
    for name, spent in report["seconds"].items():
        assert report["mb_per_second_per_process"][name] == pytest.approx(report["text_bytes"] / 1e6 / spent)
        assert name in prepare.table(report)
    assert (report["ratio"] is not None) == there


@pytest.mark.system
def test_a_sync_over_slow_lines_is_measured() -> None:
    reason = lines.why_not("iperf3")
    if reason is not None:
        pytest.skip(f"no slow lines to measure: {reason}")
    command = [sys.executable, "-m", "benchmarks.wan", "--quick", "--json", "--params", "3e5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [sync["loss"] for sync in report["syncs"]] == [0, 0.005]
    for sync in report["syncs"]:
        # Of 10 and 100; but on a busy machine iperf3 may be a little off in a second.
        assert 0 < max(sync["goodput_up_mbit_s"]) < 15
        assert 10 < max(sync["goodput_down_mbit_s"]) < 150
        assert sync["payload_bytes_up"] >= 3e5 * 0.9  # a byte per parameter, a little less with zstd
        assert sync["wire_bytes_up"] > sync["payload_bytes_up"]
        assert sync["wire_bytes_down"] > sync["payload_bytes_down"] >= 3e5 * 0.9
        assert sync["ratio"] == pytest.approx(sync["sync_s"] / sync["limit_s"], abs=0.01)
        # Faster than the line (but for what its bucket holds) would be a wrong measurement.
        assert sync["sync_s"] > 0.9 * 8 * sync["payload_bytes_up"] / 10e6
    assert [training["overlap_s"] > 0 for training in report["training"]] == [False, True]
    assert all(0 < training["share_in_steps"] < 1 for training in report["training"])


@pytest.mark.system
def test_the_loop_of_a_worker_is_compared_with_a_bare_one() -> None:
    command = [sys.executable, "-m", "benchmarks.loop", "--quick", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (tiny,) = report["results"]
    assert (tiny["size"], tiny["parameters"], tiny["tokens_per_step"]) == ("tiny", 139_584, 512)
    assert tiny["segments"] == loop.ROUNDS * loop.QUICK["tiny"].segments
    assert tiny["worker_tokens_per_second"] > 0 < tiny["bare_tokens_per_second"]
    low, high = tiny["quartiles"]
    assert 0 < low <= tiny["ratio"] <= high
    assert tiny["cpu"] > 0
    assert "tokens/s" in done.stdout


@pytest.mark.system
def test_the_loop_of_several_processes_is_compared_with_a_bare_one_of_as_many() -> None:
    command = [sys.executable, "-m", "benchmarks.loop", "--quick", "--json", "--ranks", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [each["size"] for each in results] == ["tiny, 2 ranks, ddp", "tiny, 2 ranks, fsdp"]
    for each in results:
        assert each["segments"] == loop.ROUNDS * loop.QUICK["tiny"].segments
        assert 0 < each["quartiles"][0] <= each["ratio"] <= each["quartiles"][1]


class Taken:
    """A clock for turns of which nothing takes time but what the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


def test_turns_leave_out_the_sync_and_compare_with_the_bare_segments_around(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, bare_s = Taken(), iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "process_time", lambda: clock.seconds / 2)

    def bare() -> loop.Seconds:
        began = loop.Seconds.now()
        clock.pass_by(next(bare_s))
        return loop.Seconds.now().since(began)

    turns = loop.Turns(loop.Size("", 1, 1, segment=2, segments=2), bare)
    for _ in range(2):
        for inner_step in range(6):
            clock.pass_by(100 if inner_step in (0, 5) else 10)  # the first and the last have parts of the sync
            turns()
    assert turns.worker == [(20, 10)] * 4
    assert [(before.wall, after.wall) for before, after in turns.around] == [(1, 2), (2, 3), (4, 5), (5, 6)]
    assert turns.ratios("wall") == turns.ratios("cpu") == [1.5 / 20, 2.5 / 20, 4.5 / 20, 5.5 / 20]


@pytest.mark.parametrize(
    ("user", "absent", "said"),
    [
        (1000, (), "not root"),
        (0, ("iperf3",), "no iperf3 (Debian: apt install iperf3)"),
        (0, ("ip", "tc", "nft"), "no ip and no tc and no nft (Debian: apt install iproute2 nftables)"),
    ],
)
def test_without_root_or_tools_it_says_so_and_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user: int, absent: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in absent else tool)
    monkeypatch.setattr(sys, "argv", ["wan"])
    assert wan.main() == wan.NO_LINES_EXIT
    assert capsys.readouterr() == ("", f"There are no slow lines on this machine: {said}.\n")


def test_the_relay_adds_a_round_trip_and_changes_nothing() -> None:
    sent = os.urandom(3_000_000)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def through() -> tuple[float, bytes]:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        with wan.Delay(server.sockets[0].getsockname()[1]) as relay:
            reader, writer = await asyncio.open_connection(*await asyncio.to_thread(relay.listen, "127.0.0.1", "w"))
            started = time.monotonic()
            writer.write(sent[:1])
            received = await reader.readexactly(1)
            took = time.monotonic() - started
            writer.write(sent[1:])
            received += await reader.readexactly(len(sent) - 1)
            writer.close()
            server.close()
            return took, received

    took, received = asyncio.run(through())
    assert took >= wan.ROUND_TRIP_S
    assert received == sent


def test_the_end_of_a_relay_ends_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with SlowLine(server.getsockname()[1], up=1e6, down=1e6, latency_s=0) as line:
            address = ("127.0.0.1", int(line.url.rsplit(":", 1)[1]))
            near = socket.create_connection(address)
            far, _ = server.accept()
        with near, far:
            assert near.recv(1) == far.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@pytest.mark.system
def test_a_small_crowd_goes_through_its_rounds() -> None:
    with coordinator_process() as running:
        report = asyncio.run(measure(running, workers=8, round_s=0.5))
    kinds = report["kinds"]
    assert report["missed_leases"] == 0
    assert kinds["contribute"]["count"] == 2 * 8
    answered = sum(kinds[kind]["count"] for kind in ("woken", "asked") if kind in kinds)
    assert answered == (3 + 2) * 8, "assignments of three rounds, deltas of two"
    assert kinds["heartbeat"]["count"] > 0
    assert 0 < kinds["heartbeat"]["p50_ms"] <= kinds["heartbeat"]["p99_ms"]
