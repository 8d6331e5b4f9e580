"""The overhead of the worker's loop: tokens per second of `outerstep worker` between syncs, compared with a bare torch
loop of the same model, data and batch.

    python -m benchmarks.loop [--quick] [--json] [--threads 1] [--only NAME …] [--ranks 2]

Both run in one process and take turns: after every few inner steps of the worker, which trains with a real coordinator,
a hook on its optimizer runs as many steps of the bare loop. So other load on the machine affects both equally. Each
segment of the worker is compared with the bare ones before and after it; the result is the median of these ratios, with
their quartiles. `cpu` is the same in CPU seconds of all threads of the process, which other load hardly changes. The
first and the last inner step of a round are not counted, as they contain parts of the sync.

With --ranks the worker has this many processes on the CPU with one thread each, once replicated and once sharded, and
the same processes run the bare loop with torch alone (loop_ranks.py). The clock is rank 0's.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.coordinator import CoordinatorProcess
from outerstep.common.exit_codes import Exit
from protocol.messages import Scope
from protocol.spec.run import RunSpec, parse_spec
from worker.agent import run_worker
from worker.data.open_training_set import TextData
from worker.models.building import build_model
from worker.settings import WorkerSettings

ROUNDS = 2


@dataclass(frozen=True)
class Size:
    """A model and its batch. `segment`: inner steps per turn; `segments`: the worker's turns per round."""

    model: str
    batch_size: int
    sequence_length: int
    segment: int
    segments: int

    @property
    def inner_steps(self) -> int:
        return 1 + self.segment * self.segments + 1

    @property
    def segment_tokens(self) -> int:
        return self.segment * self.batch_size * self.sequence_length


SMALL = (
    'config = { model_type = "llama", vocab_size = 256, hidden_size = 256, intermediate_size = 768, '
    "num_hidden_layers = 4, num_attention_heads = 4 }"
)
SIZES = {
    "tiny": Size('preset = "tiny"', 8, 64, segment=25, segments=60),
    "small": Size(SMALL, 8, 128, segment=4, segments=40),
}
QUICK = {"tiny": Size('preset = "tiny"', 8, 64, segment=5, segments=4)}

SPEC = """
name = "loop"
[model]
{size.model}
[data]
source = "python-stdlib"
sequence_length = {size.sequence_length}
[inner]
optimizer = "adamw"
batch_size = {size.batch_size}
learning_rate = 1e-3
[sync]
wait = "always"
rounds = {rounds}
inner_steps = {size.inner_steps}
[evaluation]
max_tokens = 1024
"""


class Seconds(NamedTuple):
    """Wall-clock seconds, and CPU seconds of all threads of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Seconds":
        return cls(time.perf_counter(), time.process_time())

    def since(self, began: "Seconds") -> "Seconds":
        return Seconds(self.wall - began.wall, self.cpu - began.cpu)


@dataclass
class Turns:
    """Alternates between the worker's segments and the bare loop's, and keeps their seconds. Called after every
    optimizer step of the process."""

    size: Size
    bare: Callable[[], Seconds]
    worker: list[Seconds] = field(default_factory=list)
    around: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    _steps: int = 0
    _busy: bool = False
    _began: Seconds = field(default_factory=Seconds.now)
    _before: Seconds = field(default_factory=Seconds.now)

    def __call__(self, *_: Any) -> None:
        if self._busy:
            return  # the bare loop's own step
        now = Seconds.now()
        done = self._steps % self.size.inner_steps
        self._steps += 1
        if done % self.size.segment or done == self.size.inner_steps - 1:
            return
        self._busy = True
        bare = self.bare()
        self._busy = False
        if done:
            self.worker.append(now.since(self._began))
            self.around.append((self._before, bare))
        self._before = bare
        self._began = Seconds.now()

    def ratios(self, clock: str) -> list[float]:
        """Return the speed of each of the worker's segments relative to the bare ones; `clock`: wall or cpu."""
        pairs = zip(self.worker, self.around, strict=True)
        return [statistics.mean(getattr(each, clock) for each in around) / getattr(own, clock) for own, around in pairs]


def bare_loop(model: nn.Module, spec: RunSpec, segment: int, rows: slice = slice(None)) -> Callable[[], Seconds]:
    """Return a function that trains `model` for `segment` steps in a plain loop, on these rows of each batch, and
    returns their duration in seconds."""
    data, parameters = TextData(spec), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=spec.inner.learning_rate, fused=True)
    model.train()
    unit = 0

    def train() -> Seconds:
        nonlocal unit
        began = Seconds.now()
        for _ in range(segment):
            batch = data.unit(unit)[rows]
            logits = model(batch[:, :-1]).logits
            loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            unit += 1
        return Seconds.now().since(began)

    return train


@dataclass(frozen=True)
class Result:
    size: str
    parameters: int
    tokens_per_step: int
    segments: int
    worker_tokens_per_second: float
    bare_tokens_per_second: float
    ratio: float
    quartiles: tuple[float, float]
    cpu: float


def measure(name: str, size: Size, threads: int) -> Result:
    """Train a new run to its end, in turns with the bare loop."""
    text = SPEC.format(size=size, rounds=ROUNDS)
    spec = parse_spec(text)
    torch.set_num_threads(threads)
    turns = Turns(size, bare_loop(build_model(spec, torch.device("cpu")), spec, size.segment))
    with tempfile.TemporaryDirectory(prefix="outerstep-loop-") as folder:
        coordinator = CoordinatorProcess(Path(folder) / "coordinator")
        running = coordinator.start()
        try:
            running.create_run(text)
            settings = WorkerSettings(
                url=running.url,
                run="loop",
                token=running.token(Scope.WORKER),
                name="worker",
                state_dir=Path(folder) / "worker",
                device="cpu",
                threads=threads,
            )
            hook = register_optimizer_step_post_hook(turns)
            try:
                code = run_worker(settings)
            finally:
                hook.remove()
        finally:
            coordinator.stop()
    if code is not Exit.DONE:
        raise RuntimeError(f"the worker ended with {code!r}")
    return _result(name, spec, size, turns)


def measure_ranks(name: str, size: Size, ranks: int, mode: str) -> Result:
    """Do the same with a worker of `ranks` processes, replicated or sharded (`mode`)."""
    text = SPEC.format(size=size, rounds=ROUNDS)
    with tempfile.TemporaryDirectory(prefix="outerstep-loop-") as folder:
        coordinator = CoordinatorProcess(Path(folder) / "coordinator")
        running = coordinator.start()
        try:
            running.create_run(text)
            how = {"spec": text, "size": asdict(size), "mode": mode, "directory": folder}
            how |= {"url": running.url, "token": running.token(Scope.WORKER)}
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [sys.executable, "-m", *torchrun, "-m", "benchmarks.loop_ranks", json.dumps(how)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, capture_output=True)
        finally:
            coordinator.stop()
        found = json.loads((Path(folder) / "turns.json").read_text())
    turns = Turns(size, lambda: Seconds(0, 0))
    turns.worker = [Seconds(*each) for each in found["worker"]]
    turns.around = [(Seconds(*before), Seconds(*after)) for before, after in found["around"]]
    return _result(f"{name}, {ranks} ranks, {mode}", parse_spec(text), size, turns)


def _result(name: str, spec: RunSpec, size: Size, turns: Turns) -> Result:
    if len(turns.worker) != ROUNDS * size.segments:
        raise RuntimeError(f"the worker ended after {len(turns.worker)} segments")
    low, middle, high = statistics.quantiles(turns.ratios("wall"), n=4)
    worker_s = statistics.median(each.wall for each in turns.worker)
    bare_s = statistics.median(each.wall for both in turns.around for each in both)
    return Result(
        name,
        sum(parameter.numel() for parameter in build_model(spec, torch.device("cpu")).parameters()),
        spec.unit_tokens,
        len(turns.worker),
        round(size.segment_tokens / worker_s, 1),
        round(size.segment_tokens / bare_s, 1),
        round(middle, 4),
        (round(low, 4), round(high, 4)),
        round(statistics.median(turns.ratios("cpu")), 4),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few steps; shows only that it works")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch, for both")
    parser.add_argument("--only", nargs="+", choices=SIZES, help="these sizes", metavar="NAME")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the worker; with 1, the plain loop")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else {name: SIZES[name] for name in arguments.only or SIZES}
    if arguments.ranks > 1:
        results = [
            measure_ranks(name, size, arguments.ranks, mode) for name, size in sizes.items() for mode in ("ddp", "fsdp")
        ]
    else:
        results = [measure(name, size, arguments.threads) for name, size in sizes.items()]
    load = [round(each, 2) for each in os.getloadavg()]
    _print(results, arguments.threads, load)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "threads": arguments.threads, "load": load}
        machine |= {"python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({"benchmark": "loop", **machine, "results": [asdict(result) for result in results]}))
    return 0


def _print(results: list[Result], threads: int, load: list[float]) -> None:
    table = Table(
        *(
            "model",
            "parameters",
            "tokens a step",
            "worker tokens/s",
            "bare tokens/s",
            "ratio",
            "quartiles",
            "cpu",
            "segments",
        ),
        title=f"The worker's loop between syncs, {threads} thread(s); load {', '.join(map(str, load))} at the end",
    )
    for result in results:
        table.add_row(
            result.size,
            f"{result.parameters:,}",
            str(result.tokens_per_step),
            f"{result.worker_tokens_per_second:,.0f}",
            f"{result.bare_tokens_per_second:,.0f}",
            f"{result.ratio:.2%}",
            f"{result.quartiles[0]:.2%} … {result.quartiles[1]:.2%}",
            f"{result.cpu:.2%}",
            str(result.segments),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
