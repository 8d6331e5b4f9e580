"""A coordinator and workers behind their lines, and the measurements: of a row (syncs, a plain transfer, gloo), and of
training (the share of the workers' time in inner steps)."""

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.wan.plain import plain_s
from benchmarks.wan.rows import TRAINING_LINE, TRAINING_TARGETS, Row, described, missed
from harness.coordinator import Running, coordinator_process, make_certificate
from harness.lines import Line, Shape, on_the_wire, slow_lines
from harness.remote import Remote, remote, seconds, together
from outerstep import plan
from outerstep.common.connections import CONGESTION_VARIABLE
from protocol.messages import Scope

WORKERS = 4
INNER_STEPS = 6  # per round

SPEC = """
name = "{name}"
[model]
factory = "none:none"
[data]
source = "custom"
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
overlap = {overlap}
wait = "{wait}"
upload_codec = "{upload}"
download_codec = "{download}"
[members]
min_workers = {workers}
lease_s = 3600
[checkpoints]
every_rounds = 1000
"""


@dataclass(frozen=True)
class Effort:
    """The number of workers; of measured syncs, each after `silence_s` seconds; and of gloo's all-reduces.
    `keep_windows`: without the slow start after each silence."""

    workers: int
    syncs: int
    silence_s: float
    all_reduces: int
    keep_windows: bool = False


@dataclass(frozen=True)
class Bench:
    """A coordinator and its workers behind lines."""

    running: Running
    token: str
    ca: Path | None
    workers: list[Remote]

    @property
    def lines(self) -> list[Line]:
        return [worker.line for worker in self.workers]

    def create_run(
        self,
        name: str,
        rounds: int,
        inner_steps: int = 1,
        *,
        overlap: int = 0,
        wait: str = "always",
        codecs: tuple[str, str] = ("int8", "int8"),
    ) -> None:
        upload, download = codecs
        changes = {"rounds": rounds, "inner_steps": inner_steps, "overlap": overlap, "wait": wait}
        changes["workers"] = len(self.workers)
        self.running.create_run(SPEC.format(name=name, upload=upload, download=download, **changes))

    def order(self, what: str, run: str, **more: Any) -> None:
        """Send the order to all workers of the run."""
        for rank, worker in enumerate(self.workers):
            worker.order(do=what, url=self.running.url, run=run, token=self.token, rank=rank, **more)


@contextmanager
def bench(
    shape: Shape, tcp: str, *, workers: int = WORKERS, tls: bool = False, keep_windows: bool = False
) -> Iterator[Bench]:
    """Workers behind lines of this shape, and a coordinator on this machine."""
    with ExitStack() as stack:
        stack.enter_context(_asking_for(tcp))
        shapes = {f"worker-{rank}": shape for rank in range(workers)}
        lines = stack.enter_context(slow_lines(shapes, tcp=tcp, keep_windows=keep_windows))
        address = lines["worker-0"].address
        certificate = None
        if tls:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outerstep-wan-")))
            certificate = make_certificate(folder / "tls", host=f"IP:{address}")
        running = stack.enter_context(coordinator_process(address, certificate))
        behind = [stack.enter_context(remote(line, "benchmarks.wan.worker")) for line in lines.values()]
        for worker in behind:
            worker.answer()
        yield Bench(running, running.token(Scope.WORKER), certificate and certificate.file, behind)


@contextmanager
def _asking_for(tcp: str) -> Iterator[None]:
    """Make coordinator and workers request this congestion control, as on systems that do not offer BBR by default."""
    before = os.environ.get(CONGESTION_VARIABLE)
    os.environ[CONGESTION_VARIABLE] = tcp
    try:
        yield
    finally:
        del os.environ[CONGESTION_VARIABLE]
        if before is not None:
            os.environ[CONGESTION_VARIABLE] = before


def measure(row: Row, effort: Effort) -> dict[str, Any]:
    """Measure a row, and gloo's all-reduce of as many fp32 values over the same lines."""
    with bench(row.shape, row.tcp, workers=effort.workers, tls=row.tls, keep_windows=effort.keep_windows) as made:
        syncs = _syncs(made, row, effort)
        up, down = syncs["payload_bytes"]["up"], syncs["payload_bytes"]["down"]
        plain = {"up": plain_s(made.workers[0], "up", up), "down": plain_s(made.workers[0], "down", down)}
        gloo_s = _gloo_s(made, row, effort) if effort.all_reduces else None
    limit_s, median_s = row.limit_s(up, down), statistics.median(syncs["sync_s"])
    return {
        **described(row),
        **syncs,
        "workers": effort.workers,
        "silence_s": effort.silence_s,
        "keep_windows": effort.keep_windows,
        "limit_s": limit_s,
        "planned_s": planned_s(row, effort.workers),
        "plain_s": plain,
        "gloo_s": gloo_s,
        "median_s": median_s,
        "worst_s": max(syncs["sync_s"]),
        "ratio": median_s / limit_s,
        "excess_round_trips": (median_s - limit_s) / row.shape.round_trip_s,
        "target": str(row.target),
        "missed": missed(row, median_s, limit_s, gloo_s),
    }


def planned_s(row: Row, workers: int) -> float:
    """Return the duration that `outerstep plan` predicts from what a speed test of the line would show."""
    up, down = (mbit * 1e6 / on_the_wire(1) for mbit in (row.shape.up_mbit, row.shape.down_mbit))
    line = {"up": up, "down": down, "latency_s": row.shape.round_trip_s, "loss": row.shape.loss}
    workload = plan.Workload(parameters=row.parameters, workers=workers, step_s=1.0, steps=1000, **line)
    return plan.sync_cost(workload, row.upload, row.download).sync_s


def _syncs(made: Bench, row: Row, effort: Effort) -> dict[str, Any]:
    """Measure syncs on open connections. The first sync, which opens them, is not counted."""
    rounds = effort.syncs + 1
    made.create_run("sync", rounds, codecs=(row.upload, row.download))
    ca = None if made.ca is None else str(made.ca)
    made.order("sync", "sync", ca=ca, elements=row.parameters, rounds=rounds)
    together(made.workers, 1, 0.0)
    before = made.lines[0].wire_bytes()
    answers, core_s = zip(*(_sync(made.workers, effort.silence_s) for _ in range(effort.syncs)), strict=True)
    up, down = (now - then for now, then in zip(made.lines[0].wire_bytes(), before, strict=True))
    return {
        "sync_s": [seconds(each) for each in answers],
        "core_s": statistics.median(core_s),
        # The minimum, as some syncs send a part twice.
        "payload_bytes": {way: min(each[way] for sync in answers for each in sync) for way in ("up", "down")},
        "wire_bytes": {"up": up // effort.syncs, "down": down // effort.syncs},
    }


def _sync(workers: Sequence[Remote], silence_s: float) -> tuple[list[dict[str, Any]], float]:
    """Return the workers' answers to one sync, and the machine's busy core-seconds meanwhile."""
    noted: list[float] = []
    (answers,) = together(workers, 1, silence_s, lambda: noted.append(_busy_s()))
    return answers, _busy_s() - noted[0]


def _busy_s() -> float:
    """Return the busy core-seconds of this machine since its start, of all processes."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _gloo_s(made: Bench, row: Row, effort: Effort) -> float:
    """Return the median duration of gloo's all-reduces."""
    rounds = 1 if row.shape.loss else effort.all_reduces  # with losses one takes a quarter of an hour
    with tempfile.TemporaryDirectory(prefix="outerstep-wan-") as folder:
        for rank, worker in enumerate(made.workers):
            sizes = {"workers": len(made.workers), "elements": row.parameters, "rounds": rounds}
            worker.order(do="gloo", rank=rank, meeting=f"{folder}/store", **sizes)
        return statistics.median(seconds(each) for each in together(made.workers, rounds, 0.0))


def measure_training(elements: int, rounds: int, round_s: float) -> list[dict[str, Any]]:
    """Train over the line in each of the ways."""
    with bench(TRAINING_LINE, "bbr") as made:
        return [_train(made, kind, elements, rounds, round_s / INNER_STEPS) for kind in TRAINING_TARGETS]


def _train(made: Bench, kind: str, elements: int, rounds: int, step_s: float) -> dict[str, Any]:
    """Train `rounds` rounds; one more if training goes on during a sync, which a run's last round cannot and which is
    not measured."""
    name, overlap, goes_on = f"train-{kind}", int(kind == "overlap"), kind != "classic"
    wait = "never" if kind == "never" else "always"
    made.create_run(name, rounds + goes_on, INNER_STEPS, overlap=overlap, wait=wait)
    made.order("train", name, elements=elements, step_s=step_s, measured=rounds)
    answers = [worker.answer() for worker in made.workers]
    wall = sum(each["ended"] - each["started"] for each in answers)
    in_steps = sum(each["in_steps"] for each in answers)
    with made.running.client() as http:
        account = http.get(f"/v1/runs/{name}").raise_for_status().json()["account"]
    return {
        "kind": kind,
        "down_mbit": TRAINING_LINE.down_mbit,
        "up_mbit": TRAINING_LINE.up_mbit,
        "round_trip_s": TRAINING_LINE.round_trip_s,
        "parameters": elements,
        "round_s": step_s * INNER_STEPS,
        "overlap_s": step_s * overlap,
        "sync_s": (wall - in_steps) / rounds / WORKERS,
        "share_in_steps": in_steps / wall,
        "target": TRAINING_TARGETS[kind],
        "stages_s": {stage: s / rounds / WORKERS for stage, s in account["seconds"].items()},
    }
