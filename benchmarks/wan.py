"""Ordinary internet lines: the time of a sync against the line's limit, and the share of time left for training.

    python -m benchmarks.wan [--quick] [--json] [--params 25e6] [--up 10] [--down 100]

Each worker is a process in a network namespace of its own, behind a line that is shaped to so many Mbit/s each way, and
behind a relay that adds 40 ms to the round trip; the coordinator is a process as anybody would start it. In one run:

  goodput   what iperf3 moves over each line, through the same relay, all lines at once; without and with packet loss
  sync      from the first worker's start to the last one's end, against max(bytes up / goodput up, bytes down /
            goodput down) of the slowest line: target ≤ 1.05. Bytes are those of the payloads
  training  rounds of inner steps of a fixed length (60 s in all) over 500 Mbit/s down and 110 up: the share of the
            workers' wall time that is spent in inner steps, target ≥ 96 %; and with an overlap of one of the round's
            inner steps, target ≥ 99.5 % (the run's last round, which has no overlap, is not measured there)

Needs root, iproute2, nftables and iperf3; exit code 3 where such lines cannot be made.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.coordinator import Running, coordinator_process
from benchmarks.harness.lines import Line, Rate, slow_lines, why_not
from benchmarks.harness.relay import Relay
from protocol.messages import Scope
from protocol.spec.sections import SyncSpec

WORKERS = 4
ROUND_TRIP_S = 0.04
LOSS_PER_MILLE = 5
NO_LINES_EXIT = 3
FULL_ELEMENTS = 25_000_000
READ_BYTES = 1 << 16
PIECES_UNDER_WAY = 64  # at most, per connection and way: a 20 ms stretch of 1.6 Gbit/s

SPEC = """
name = "{name}"
[model]
factory = "none:none"
[data]
source = "custom"
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
fragment_elements = {fragment_elements}
overlap = {overlap}
[members]
min_workers = {workers}
lease_s = 600
[checkpoints]
every_rounds = 1000
"""


class Delay(Relay):
    """A relay that delays bytes by half a round trip, however many there are."""

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_UNDER_WAY)
        writer.transport.set_write_buffer_limits(high=0)  # when drain returns, the kernel has it

        async def take() -> None:
            piece = b"first"
            while piece:
                try:
                    piece = await reader.read(READ_BYTES)
                except ConnectionResetError:
                    piece = b""  # an end like any other
                await under_way.put((loop.time() + ROUND_TRIP_S / 2, piece))

        taking = asyncio.create_task(take())
        try:
            while True:
                due, piece = await under_way.get()
                await asyncio.sleep(due - loop.time())
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()
        finally:
            taking.cancel()


@dataclass
class Far:
    """A worker process behind its line, and the address at which it finds the coordinator."""

    line: Line
    url: str
    process: subprocess.Popen[str]

    def order(self, **order: Any) -> None:
        self._send(json.dumps(order))

    def go(self) -> None:
        self._send("go")

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Bench:
    """A coordinator, its workers, and the relays to iperf3's servers."""

    running: Running
    token: str
    workers: list[Far]
    iperf: list[
        tuple[int, str, int]
    ]  # per line: the port of iperf3's server, and the relay's address and port before it
    elements: int

    @classmethod
    @contextlib.contextmanager
    def started(cls, rate: Rate, elements: int) -> Iterator["Bench"]:
        with contextlib.ExitStack() as cleanup:
            names = [f"worker-{rank}" for rank in range(WORKERS)]
            lines = cleanup.enter_context(slow_lines(names, rate))
            running = cleanup.enter_context(coordinator_process())
            relay = cleanup.enter_context(Delay(running.port))
            workers, iperf = [], []
            for name, line in lines.items():
                address, port = relay.listen(line.address, name)
                command = [*line.prefix, sys.executable, "-m", "benchmarks.wan_worker"]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                cleanup.enter_context(process)
                cleanup.callback(process.terminate)
                workers.append(Far(line, f"http://{address}:{port}", process))
                server_port = _free_port()
                iperf.append((server_port, *cleanup.enter_context(Delay(server_port)).listen(line.address, name)))
            for worker in workers:
                worker.answer()
            yield cls(running, running.token(Scope.WORKER), workers, iperf, elements)

    def shape(self, rate: Rate) -> None:
        for worker in self.workers:
            worker.line.shape(rate)

    def goodput(self, seconds: int) -> list[tuple[float, float]]:
        """Measure bytes per second up and down each line, all lines at once."""

        def measure(rank: int, way: list[str]) -> float:
            server_port, address, port = self.iperf[rank]
            server = ["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", str(server_port)]
            client = [
                "iperf3",
                "--client",
                address,
                "--port",
                str(port),
                "--time",
                str(seconds),
                "--omit",
                "1",
                "--json",
            ]
            with subprocess.Popen([*server, "--forceflush"], stdout=subprocess.PIPE, text=True) as serving:
                assert serving.stdout is not None
                while "listening" not in serving.stdout.readline():
                    pass
                done = subprocess.run(
                    [*self.workers[rank].line.prefix, *client, *way], capture_output=True, text=True, check=False
                )
                serving.communicate()
            report = json.loads(done.stdout)
            if "error" in report:
                raise RuntimeError(f"iperf3: {report['error']}")
            return float(report["end"]["sum_received"]["bits_per_second"]) / 8

        with ThreadPoolExecutor(WORKERS) as pool:
            up = list(pool.map(lambda rank: measure(rank, []), range(WORKERS)))
            down = list(pool.map(lambda rank: measure(rank, ["--reverse"]), range(WORKERS)))
        return list(zip(up, down, strict=True))

    def create_run(self, name: str, rounds: int, inner_steps: int, overlap: int = 0) -> None:
        default = SyncSpec.model_fields["fragment_elements"].default
        spec = SPEC.format(
            name=name,
            rounds=rounds,
            inner_steps=inner_steps,
            fragment_elements=round(default * min(self.elements / FULL_ELEMENTS, 1)),
            overlap=overlap,
            workers=WORKERS,
        )
        self.running.create_run(spec)

    def _orders(self, run: str, what: str, **more: Any) -> None:
        for rank, worker in enumerate(self.workers):
            order = {"do": what, "url": worker.url, "run": run, "token": self.token, "rank": rank}
            worker.order(**order, elements=self.elements, **more)

    def sync(self, name: str, rate: Rate, rounds: int, iperf_s: int) -> dict[str, Any]:
        """Measure syncs. Return the medians over the rounds."""
        self.shape(rate)
        goodput = self.goodput(iperf_s)
        self.create_run(name, rounds, 1)
        self._orders(name, "sync", rounds=rounds)
        took, limits = [], []
        for _ in range(rounds):
            for worker in self.workers:
                worker.answer()
            before = self.workers[0].line.wire_bytes()
            for worker in self.workers:
                worker.go()
            answers = [worker.answer() for worker in self.workers]
            after = self.workers[0].line.wire_bytes()
            took.append(max(each["ended"] for each in answers) - min(each["started"] for each in answers))
            limits.append(
                max(
                    max(each["up"] / up, each["down"] / down) for each, (up, down) in zip(answers, goodput, strict=True)
                )
            )
        return {
            "line": f"{rate.down_kbit / 1000:g}/{rate.up_kbit / 1000:g} Mbit/s",
            "loss": rate.loss_per_mille / 1000,
            "parameters": self.elements,
            "sync_s": round(statistics.median(took), 3),
            "limit_s": round(statistics.median(limits), 3),
            "ratio": round(statistics.median(took) / statistics.median(limits), 3),
            "payload_bytes_up": answers[0]["up"],
            "payload_bytes_down": answers[0]["down"],
            "wire_bytes_up": after[0] - before[0],
            "wire_bytes_down": after[1] - before[1],
            "goodput_up_mbit_s": [round(up * 8 / 1e6, 2) for up, _ in goodput],
            "goodput_down_mbit_s": [round(down * 8 / 1e6, 2) for _, down in goodput],
        }

    def train(self, rate: Rate, rounds: int, step_s: float, inner_steps: int, overlap: int) -> dict[str, Any]:
        """Return the share of the wall time that all workers together spend in inner steps."""
        self.shape(rate)
        name = f"train-{overlap}"
        self.create_run(name, rounds + (overlap > 0), inner_steps, overlap)
        self._orders(name, "train", step_s=step_s, measured=rounds)
        answers = [worker.answer() for worker in self.workers]
        wall = sum(each["ended"] - each["started"] for each in answers)
        in_steps = sum(each["in_steps"] for each in answers)
        with self.running.client() as http:
            account = http.get(f"/v1/runs/{name}").raise_for_status().json()["account"]
        return {
            "line": f"{rate.down_kbit / 1000:g}/{rate.up_kbit / 1000:g} Mbit/s",
            "parameters": self.elements,
            "round_s": round(step_s * inner_steps, 1),
            "overlap_s": round(step_s * overlap, 1),
            "sync_s": round((wall - in_steps) / rounds / WORKERS, 3),
            "share_in_steps": round(in_steps / wall, 4),
            "stages_s": {stage: round(s / rounds / WORKERS, 2) for stage, s in account["seconds"].items()},
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 M parameters, a round each, and 9.6 s of inner steps")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the tables")
    parser.add_argument("--params", type=float, help=f"parameters; default {FULL_ELEMENTS:.0e}")
    parser.add_argument("--up", type=float, default=10, help="Mbit/s; default 10")
    parser.add_argument("--down", type=float, default=100, help="Mbit/s; default 100")
    arguments = parser.parse_args()
    reason = why_not("iperf3")
    if reason is not None:
        print(f"There are no slow lines on this machine: {reason}.", file=sys.stderr)
        return NO_LINES_EXIT

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and namespaces are cleaned up
    elements = int(arguments.params or (4e6 if arguments.quick else FULL_ELEMENTS))
    rounds, iperf_s = (1, 1) if arguments.quick else (2, 4)
    rate = Rate(round(arguments.up * 1000), round(arguments.down * 1000))
    lossy = Rate(rate.up_kbit, rate.down_kbit, LOSS_PER_MILLE)
    with Bench.started(rate, elements) as bench:
        syncs = [bench.sync("clean", rate, rounds, iperf_s), bench.sync("lossy", lossy, rounds, iperf_s)]
        # A smaller model on the same line has shorter rounds, so that training and sync keep their ratio.
        round_s = 60 * min(elements / FULL_ELEMENTS, 1)
        training = [
            bench.train(Rate(110_000, 500_000), 1 if arguments.quick else 2, round_s / 6, 6, overlap)
            for overlap in (0, 1)
        ]
    _print(syncs, training)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "wan", **machine, "syncs": syncs, "training": training}))
    return 0


def _print(syncs: list[dict[str, Any]], training: list[dict[str, Any]]) -> None:
    table = Table(
        *("line down/up", "loss", "parameters", "sync s", "limit s", "ratio", "payload MB up", "down"),
        *("wire MB up", "down", "goodput Mbit/s up", "down"),
        title=f"one sync, {WORKERS} workers, {1000 * ROUND_TRIP_S:.0f} ms; target: ratio ≤ 1.05",
    )
    for r in syncs:
        table.add_row(
            *(r["line"], f"{r['loss']:.1%}", f"{r['parameters']:,}", f"{r['sync_s']:.2f}", f"{r['limit_s']:.2f}"),
            *(f"{r['ratio']:.3f}", f"{r['payload_bytes_up'] / 1e6:.2f}", f"{r['payload_bytes_down'] / 1e6:.2f}"),
            *(f"{r['wire_bytes_up'] / 1e6:.2f}", f"{r['wire_bytes_down'] / 1e6:.2f}"),
            *(f"{min(r[f'goodput_{way}_mbit_s']):.2f}–{max(r[f'goodput_{way}_mbit_s']):.2f}" for way in ("up", "down")),
        )
    share = Table(
        *("line down/up", "parameters", "inner steps s per round", "overlap s", "other s", "share in inner steps"),
        title="training; target: share ≥ 96 %, with overlap ≥ 99.5 %",
    )
    for r in training:
        share.add_row(
            *(r["line"], f"{r['parameters']:,}", f"{r['round_s']:.1f}", f"{r['overlap_s']:.1f}"),
            *(f"{r['sync_s']:.2f}", f"{r['share_in_steps']:.2%}"),
        )
    console = Console(width=170)
    console.print(table)
    console.print(share)
    for r in training:
        stages = ", ".join(f"{stage} {seconds}" for stage, seconds in r["stages_s"].items() if stage != "train")
        console.print(
            f"overlap {r['overlap_s']} s, seconds per round, some of them at the same time: {stages}", highlight=False
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
