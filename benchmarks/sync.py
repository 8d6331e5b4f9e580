"""One outer round over loopback without training: Outerstep's sync and gloo's fp32 all-reduce, in the same run.

    python -m benchmarks.sync [--quick] [--json] [--params 25e6 100e6] [--workers 4] [--rounds 5] [--only speed]

Each worker process holds a random pseudo-gradient and does alternately
  sync    what `outerstep worker` does with it: encode, upload (durable before it is acknowledged), wait for the delta,
          download, decode, outer step, digests; through a real coordinator process, int8 both ways
  gloo    torch.distributed.all_reduce of the same fp32 values, by gloo on loopback
A round lasts from the first worker's start to the last worker's end. Reported are medians over the rounds after a
warm-up, the bytes per worker, the error of the mean against fp32, and the coordinator's peak resident memory above
its memory before the first worker joined; then that peak with 2 and with 32 workers, and with more parameters.

As `DiLoCo` does with the pseudo-gradients, each worker takes the digests of its outer state before the sync begins.
Core-seconds are of one sync, over all workers and the coordinator; divided by the cores they are the least time of a
sync on this machine.
"""

import argparse
import json
import multiprocessing
import os
import platform
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed
from rich.console import Console
from rich.table import Table

from benchmarks.syncing import SyncingWorker
from harness.coordinator import InProcess, coordinator_process
from harness.ports import free_port
from protocol.messages import Metrics
from worker.link.client import Client, open_http

# Workers and parameters for the coordinator's memory; and the rounds until its memory stops growing.
CREWS = ((2, 25_000_000), (32, 25_000_000), (2, 100_000_000), (2, 400_000_000))
QUICK_CREWS = ((2, 8_000_000), (8, 8_000_000))
MEMORY_ROUNDS = 5

SPEC = """
name = "{name}"
[model]
factory = "none:none"
[data]
source = "custom"
[outer]
learning_rate = 1.0
momentum = 0.0
[sync]
wait = "always"
rounds = {rounds}
inner_steps = 1
upload_codec = "int8"
download_codec = "int8"
zstd = false
[members]
min_workers = {workers}
lease_s = 3600
[checkpoints]
every_rounds = 1000
"""


@dataclass(frozen=True)
class Plan:
    """One configuration to measure. `gloo_port` is None to skip gloo."""

    coordinator: InProcess
    run: str
    workers: int
    elements: int
    rounds: int
    gloo_port: int | None


def measure(plan: Plan) -> dict[str, Any]:
    """Run a plan with `plan.workers` processes, or without gloo with threads, which need less memory."""
    context: Any = multiprocessing.get_context("spawn")
    if plan.gloo_port is None:
        context = SimpleNamespace(Barrier=threading.Barrier, Queue=queue.Queue, Process=threading.Thread)
    barrier, results = context.Barrier(plan.workers), context.Queue()
    idle = plan.coordinator.memory("VmRSS")
    plan.coordinator.create_run(SPEC.format(name=plan.run, workers=plan.workers, rounds=plan.rounds + 1))
    processes = [context.Process(target=_worker, args=(plan, rank, barrier, results)) for rank in range(plan.workers)]
    for process in processes:
        process.start()
    reports = [results.get() for _ in processes]
    for process in processes:
        process.join()

    def seconds(what: str) -> float:
        return statistics.median(round_seconds([report[what] for report in reports])[1:])

    def cpu_seconds(*roles: str) -> float:
        """Return the CPU time of one round's sync, over all processes of these roles."""
        return statistics.median(sum(r[role][i] for r in reports for role in roles) for i in range(1, plan.rounds + 1))

    report = {
        "workers": plan.workers,
        "parameters": plan.elements,
        "sync_s": round(seconds("sync"), 4),
        "workers_cpu_s": round(cpu_seconds("worker_cpu"), 3),
        "coordinator_cpu_s": round(cpu_seconds("coordinator_cpu"), 3),
        "upload_bytes": reports[0]["upload_bytes"] // (plan.rounds + 1),
        "download_bytes": reports[0]["download_bytes"] // (plan.rounds + 1),
        "coordinator_idle_rss": idle,
        "coordinator_rss_above_idle": plan.coordinator.memory("VmHWM") - idle,
    }
    if plan.gloo_port is not None:
        report["gloo_fp32_s"] = round(seconds("gloo"), 4)
        report["ratio"] = round(report["sync_s"] / report["gloo_fp32_s"], 3)
        report["relative_error"] = round(max(r["relative_error"] for r in reports), 5)
        report["allreduce_bytes"] = round(2 * (plan.workers - 1) / plan.workers * 4 * plan.elements)
    return report


def round_seconds(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return each round's time from the first start to the last end, from (start, end) per worker and round."""
    return [max(end for _, end in round_) - min(start for start, _ in round_) for round_ in zip(*spans, strict=True)]


def _worker(plan: Plan, rank: int, barrier: Barrier, results: Any) -> None:
    torch.set_num_threads(1)
    if plan.gloo_port is not None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.gloo_port), "GLOO_SOCKET_IFNAME": "lo"}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=plan.workers)
    report: dict[str, Any] = {"sync": [], "gloo": [], "worker_cpu": [], "coordinator_cpu": []}
    coordinator = plan.coordinator
    with open_http(coordinator.url) as http:
        client = Client(http, plan.run, coordinator.admin_token)
        worker = SyncingWorker(client, rank, plan.elements)
        before = client.traffic.upload_bytes
        for round_ in range(plan.rounds + 1):
            work = worker.work(round_)
            barrier.wait()
            cpu, coordinator_cpu = time.process_time(), coordinator.cpu_seconds()
            started = time.monotonic()
            worker.sync(work)
            report["sync"].append((started, time.monotonic()))
            report["worker_cpu"].append(time.process_time() - cpu)
            barrier.wait()
            # There is one coordinator, so one worker reports it.
            report["coordinator_cpu"].append((coordinator.cpu_seconds() - coordinator_cpu) * (rank == 0))
            _await_idle(coordinator.pid)
            if plan.gloo_port is not None:
                values = worker.delta.clone()
                barrier.wait()
                started = time.monotonic()
                torch.distributed.all_reduce(values)
                values /= plan.workers
                report["gloo"].append((started, time.monotonic()))
                if round_ == 0:  # θ was 0, η is 1 and β is 0: the outer step made θ the negative mean
                    mean = torch.cat(worker.state.theta).neg()
                    report["relative_error"] = float((mean - values).norm() / values.norm())
        report["upload_bytes"] = client.traffic.upload_bytes - before
        report["download_bytes"] = client.traffic.download_bytes
        worker.membership.leave(worker.state.round, worker.state.digest(), Metrics())
    if plan.gloo_port is not None:
        torch.distributed.destroy_process_group()
    results.put(report)


def _await_idle(pid: int) -> None:
    """Wait until the coordinator has finished its own outer step, which it takes while workers train."""
    process = psutil.Process(pid)
    while process.cpu_percent(interval=0.25) > 10:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="25 M parameters and 3 rounds; memory with 2 and 8 workers only"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    parser.add_argument("--only", choices=["speed", "memory"], help="one half of it")
    parser.add_argument("--params", type=float, nargs="+", help="parameters; default 25e6 100e6")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="measured rounds, after a warm-up; default 5")
    arguments = parser.parse_args()
    sizes = arguments.params or ([25e6] if arguments.quick else [25e6, 100e6])
    rounds = arguments.rounds or (3 if arguments.quick else 5)

    reports, memory = [], []
    for number, elements in enumerate(sizes if arguments.only != "memory" else []):
        with coordinator_process() as coordinator:
            plan = Plan(coordinator, f"sync-{number}", arguments.workers, int(elements), rounds, free_port())
            reports.append(measure(plan))
    crews = QUICK_CREWS if arguments.quick else CREWS
    for workers, elements in crews if arguments.only != "speed" else []:
        with coordinator_process() as coordinator:
            plan = Plan(coordinator, f"rss-{workers}-{elements}", workers, elements, MEMORY_ROUNDS, None)
            memory.append(measure(plan))
    _print(reports, memory)
    if arguments.json:
        total = [m["coordinator_idle_rss"] + m["coordinator_rss_above_idle"] for m in memory]
        document = {
            "benchmark": "sync",
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rounds": reports,
            "memory": memory,
            "rss_growth": [round(each / total[0] - 1, 3) for each in total[1:]],
        }
        print(json.dumps(document))


def _print(reports: list[dict[str, Any]], memory: list[dict[str, Any]]) -> None:
    table = Table(
        *("parameters", "workers", "sync s", "gloo fp32 s", "ratio", "workers' core-s", "coordinator's core-s"),
        *("up MB", "down MB", "all-reduce MB", "error", "RSS above idle MB"),
        title="one round, medians",
    )
    for r in reports:
        table.add_row(
            f"{r['parameters']:,}",
            f"{r['workers']}",
            f"{r['sync_s']:.3f}",
            f"{r['gloo_fp32_s']:.3f}",
            f"{r['ratio']:.2f}",
            f"{r['workers_cpu_s']:.2f}",
            f"{r['coordinator_cpu_s']:.2f}",
            f"{r['upload_bytes'] / 1e6:.1f}",
            f"{r['download_bytes'] / 1e6:.1f}",
            f"{r['allreduce_bytes'] / 1e6:.1f}",
            f"{r['relative_error']:.4f}",
            f"{r['coordinator_rss_above_idle'] / 1e6:.0f}",
        )
    peak = Table("parameters", "workers", "total MB", "above idle MB", title="coordinator, peak RSS")
    for m in memory:
        above, idle = m["coordinator_rss_above_idle"], m["coordinator_idle_rss"]
        size = f"{(idle + above) / 1e6:.0f}", f"{above / 1e6:.0f}"
        peak.add_row(f"{m['parameters']:,}", f"{m['workers']}", *size)
    console = Console(width=180)
    for each, filled in ((table, reports), (peak, memory)):
        if filled:
            console.print(each)


if __name__ == "__main__":
    main()
