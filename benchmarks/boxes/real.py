"""Real boxes: a coordinator process, and `outerstep worker` in a process per box, each slowed down to its speed.

An inner step of speed s takes at least `step_s` / s seconds, which a worker mostly sleeps, as it would wait for its
GPU. So several fit on two cores. The speed is read from a file in each step, so a box can change while it trains.
"""

import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.boxes.rows import LINES, Size, spec_of
from harness.coordinator import CoordinatorProcess, Running
from harness.lines import Shape, slow_lines
from harness.worker_processes import WorkerProcesses
from protocol.messages import RunState, Stage
from protocol.spec.run import parse_spec
from worker.models.building import build_model

PAUSE_S = 0.05
POLL_S = 1.0  # the run's own records have the times; each question costs the coordinator some milliseconds
DISK_BYTES = 64 << 20
LONGEST, LEAST_S = 4.0, 120.0
PACE_VARIABLE, SEED_VARIABLE, MODEL_VARIABLE = "BOXES_PACE", "BOXES_SEED", "BOXES_MODEL"
FACTORY = "benchmarks.boxes.real:build"
HANG, SPOIL = "hang", "spoil"
RUN = "boxes"
GOING_ON = (RunState.SEEDING, RunState.RUNNING)


class Paced(nn.Module):
    """The model that MODEL_VARIABLE names. Its pace is in the file that PACE_VARIABLE names: seconds per inner step;
    `hang`: the training thread never returns, while the others go on; `spoil`: the parameters grow in each step, so
    that what the worker contributes is far too large."""

    def __init__(self) -> None:
        super().__init__()
        seed = int(os.environ[SEED_VARIABLE])
        size = Size(model=os.environ[MODEL_VARIABLE])
        self.model = build_model(parse_spec(spec_of(size, 1, seed)), torch.device("cpu"))
        self._pace, self._ready_at = Path(os.environ[PACE_VARIABLE]), 0.0
        self._begun = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, float32[batch, length, 256], for int64[batch, length]."""
        if self.training:
            self._wait()
        logits: Tensor = self.model(tokens).logits
        return logits

    def _wait(self) -> None:
        *orders, step_s = self._pace.read_text().split()
        while HANG in orders:
            time.sleep(PAUSE_S)
        if SPOIL in orders:
            for each in self.model.parameters():
                each.data.mul_(1.5)
        now, step = time.monotonic(), float(step_s)
        self._begun += 1
        # Else the last step's work is part of its time. The first step's is not: it allocates, and may take several.
        idle = self._begun <= 2 or now > self._ready_at + 2 * step
        self._ready_at = now + step if idle else max(self._ready_at + step, now)
        time.sleep(self._ready_at - now)


def build() -> nn.Module:
    return Paced()


@dataclass(frozen=True)
class Measured:
    """A run. Times are seconds by the coordinator's clock.

    finished       False if it took more than LONGEST times as long as the fastest box alone, and LEAST_S
    seconds        from the opening of the first round to the end of the last
    loss           held-out, of the last state, nats per token
    tokens         trained on and in the model
    in_steps       share of the boxes' time that was spent in inner steps
    up, down       bytes of all boxes
    contributions  by box
    rounds_s       the duration of each round, from its opening to that of the next
    left_out       rounds in which a contribution did not count, by box
    """

    finished: bool
    seconds: float
    loss: float
    tokens: int
    in_steps: float
    up: int
    down: int
    contributions: list[int]
    rounds_s: list[float]
    left_out: dict[str, int]


@dataclass
class Scene:
    """A run while it trains, for a trouble to change."""

    size: Size
    workers: WorkerProcesses
    coordinator: CoordinatorProcess
    names: list[str]
    start: Callable[[str], subprocess.Popen[bytes]]
    pace: Callable[[str, str], None]
    shape: Callable[[str, Shape], None]
    processes: dict[str, subprocess.Popen[bytes]]
    disk: Callable[[str], Path]

    def await_round(self, round_: int) -> bool:
        """Wait until the run is at this round. Return False if it has ended."""
        while (detail := self.workers.detail()).state in GOING_ON:
            if detail.round >= round_:
                return True
            time.sleep(POLL_S)
        return False


Trouble = Callable[[Scene, int], None]


def measure(
    speeds: list[float],
    size: Size,
    rounds: int,
    seed: int,
    *,
    sync: str = "default",
    line: str = "none",
    members: str = "",
    trouble: Trouble | None = None,
    small_disks: bool = False,
) -> Measured:
    """Train a run to its end. `trouble` is called when half of the rounds are over. `small_disks`: each box has its
    state on a disk of its own, of DISK_BYTES. Raises RuntimeError if the first box fails."""
    names = [f"box-{index}" for index in range(len(speeds))]
    shape = LINES[line]
    with tempfile.TemporaryDirectory(prefix="outerstep-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        lines = stack.enter_context(slow_lines({} if shape is None else dict.fromkeys(names, shape)))
        host = lines[names[0]].address if lines else "127.0.0.1"
        coordinator = CoordinatorProcess(folder / "data", host=host)
        stack.callback(coordinator.stop)
        running = coordinator.start()
        running.create_run(spec_of(size, rounds, seed, sync, f'factory = "{FACTORY}"', members))
        workers = stack.enter_context(WorkerProcesses(running, RUN, folder))
        for name in names if small_disks else ():
            stack.enter_context(_small_disk(folder / name))

        def pace(name: str, order: str) -> None:
            step_s = size.step_s / speeds[names.index(name)]
            part = folder / f"{name}.pace.part"
            part.write_text(f"{order} {step_s}")
            part.rename(folder / f"{name}.pace")

        def start(name: str) -> subprocess.Popen[bytes]:
            pace_file = str(folder / f"{name}.pace")
            environment = {
                PACE_VARIABLE: pace_file,
                SEED_VARIABLE: str(seed),
                MODEL_VARIABLE: size.model,
                "OMP_NUM_THREADS": "1",
            }
            options = ("--allow-code", FACTORY)
            prefix = lines[name].prefix if lines else []
            return workers.start(name, *options, environment=environment, prefix=prefix)

        with running.client() as http:
            _change(http, "paused")  # until all boxes are there
            processes = {}
            for name in names:
                pace(name, "")
                processes[name] = start(name)
            while sum(each.state == "live" for each in workers.workers()) < len(names):
                workers.check()
                time.sleep(PAUSE_S)
            _change(http, "running")
        shape_line = lambda name, to: lines[name].shape(to)  # noqa: E731
        scene = Scene(size, workers, coordinator, names, start, pace, shape_line, processes, lambda name: folder / name)
        if trouble is not None and scene.await_round(rounds // 2):
            trouble(scene, rounds // 2)
        ends_at = time.monotonic() + max(LONGEST * size.alone_s, LEAST_S)
        while workers.detail().state in GOING_ON and time.monotonic() < ends_at:
            if processes[names[0]].poll():
                workers.check()
            time.sleep(POLL_S)
        if (detail := workers.detail()).state is RunState.FINISHED:
            evaluated_by = time.monotonic() + LEAST_S
            while not _is_evaluated(running, detail.round):  # the first box that sees the end evaluates its last state
                if time.monotonic() > evaluated_by:
                    raise RuntimeError(f"no box has evaluated the last state, {detail.round}")
                time.sleep(POLL_S)
        return _measured(workers, names)


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk there, in memory. Needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _is_evaluated(running: Running, state: int) -> bool:
    with running.client() as http:
        events = http.get(f"/v1/runs/{RUN}/events", params={"limit": 1000}).raise_for_status().json()["items"]
    return any(each["kind"] == "evaluated" and each["data"]["round"] == state for each in events)


def _change(http: Any, state: str) -> None:
    http.patch(f"/v1/runs/{RUN}", json={"state": state}).raise_for_status()


def _measured(workers: WorkerProcesses, names: list[str]) -> Measured:
    detail = workers.detail()
    contributions = {each.name: each.contributions for each in workers.workers()}
    rounds = [workers.round(number) for number in range(detail.round)]
    if detail.state is RunState.RUNNING:
        rounds.append(workers.round(detail.round))
    ends = [each.opened_at for each in rounds[1:]] + [rounds[-1].closed_at or time.time()]
    left_out: Counter[str] = Counter()
    for each in rounds:
        left_out.update(
            {who for part in each.fragments for who, verdict in part.verdicts.items() if verdict.factor == 0}
        )
    assert detail.held_out_loss is not None
    return Measured(
        finished=detail.state is RunState.FINISHED,
        seconds=round(ends[-1] - rounds[0].opened_at, 3),
        loss=detail.held_out_loss,
        tokens=detail.tokens,
        in_steps=round(detail.account.seconds[Stage.TRAIN] / detail.account.total_s, 4),
        up=detail.account.upload_bytes,
        down=detail.account.download_bytes,
        contributions=[contributions[name] for name in names],
        rounds_s=[round(end - each.opened_at, 3) for each, end in zip(rounds, ends, strict=True)],
        left_out=dict(left_out),
    )
