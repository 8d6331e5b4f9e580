"""What a coordinator that is away costs: time in which workers do not train, and loss.

    python -m benchmarks.absence [--seeds 3] [--workers 2] [--rounds 60] [--away 3] [--every 15] [--quick] [--json]

Real processes: a coordinator, and workers that train the model `tiny` on the standard library's sources. The
coordinator is killed with SIGKILL every `--every` seconds and started again after `--away` seconds. By row:

  always        sync.wait = "always": a worker waits for its deltas
  never         sync.wait = "never": it trains on
  undisturbed   as many rounds of "always" as have the tokens of "never"; the coordinator is never away

Trained is the share of the workers' time in inner steps. The held-out loss is that of the last state, nats per byte,
and compared with the undisturbed run's.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.coordinator import CoordinatorProcess
from harness.worker_processes import WorkerProcesses
from protocol.messages import Stage

PAUSE_S = 0.1
SPEC = """
name = "{name}"
seed = {seed}
[model]
preset = "tiny"
[data]
source = "python-stdlib"
sequence_length = 64
[inner]
batch_size = 8
warmup_steps = {inner_steps}
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
wait = "{wait}"
fragment_elements = 50_000
[members]
min_workers = {workers}
[evaluation]
every_rounds = 1_000
max_tokens = {evaluation_tokens}
"""


@dataclass(frozen=True)
class Effort:
    workers: int
    rounds: int
    inner_steps: int
    away_s: float
    every_s: float
    evaluation_tokens: int


@dataclass(frozen=True)
class Row:
    """`trained`: share of the workers' time in inner steps. `loss`: held-out, nats per byte."""

    name: str
    seed: int
    seconds: float
    outages: int
    trained: float
    tokens: int
    loss: float


def measure(name: str, wait: str, seed: int, rounds: int, effort: Effort, *, disturbed: bool) -> Row:
    """Train one run to its end. Raises RuntimeError if a worker does not end well."""
    with tempfile.TemporaryDirectory(prefix="outerstep-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        coordinator = CoordinatorProcess(directory / "data")
        stack.callback(coordinator.stop)
        running = coordinator.start()
        sizes = {"inner_steps": effort.inner_steps, "workers": effort.workers}
        sizes["evaluation_tokens"] = effort.evaluation_tokens
        running.create_run(SPEC.format(name=name, seed=seed, rounds=rounds, wait=wait, **sizes))
        workers = stack.enter_context(WorkerProcesses(running, name, directory))
        for index in range(effort.workers):
            workers.start(f"w{index}", "--threads", "1", "--data-root", "/")
        while workers.are_training and workers.detail().round == 0:  # they are still loading
            time.sleep(PAUSE_S)
        began, outages = time.monotonic(), 0
        while workers.are_training:
            if disturbed and time.monotonic() > began + (outages + 1) * effort.every_s - effort.away_s:
                coordinator.kill()
                time.sleep(effort.away_s)
                coordinator.start()
                outages += 1
            time.sleep(PAUSE_S)
        seconds = time.monotonic() - began
        workers.check()
        info = workers.detail()
        assert info.held_out_loss is not None
        trained = info.account.seconds.get(Stage.TRAIN, 0.0) / info.account.total_s
        return Row(name, seed, seconds, outages, trained, info.tokens, info.held_out_loss)


def measure_seed(seed: int, effort: Effort) -> list[Row]:
    always = measure("always", "always", seed, effort.rounds, effort, disturbed=True)
    never = measure("never", "never", seed, effort.rounds, effort, disturbed=True)
    rounds = round(effort.rounds * never.tokens / always.tokens)
    return [always, never, measure("undisturbed", "always", seed, rounds, effort, disturbed=False)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.absence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--away", type=float, default=3.0, help="seconds")
    parser.add_argument("--every", type=float, default=15.0, help="seconds")
    parser.add_argument("--quick", action="store_true", help="one seed, short rounds: shows only that it works")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    arguments = parser.parse_args()
    effort = Effort(arguments.workers, arguments.rounds, 100, arguments.away, arguments.every, 131_072)
    seeds = arguments.seeds
    if arguments.quick:
        effort, seeds = Effort(arguments.workers, 20, 20, 0.5, 8.0, 4_096), 1
    rows = [row for seed in range(seeds) for row in measure_seed(seed, effort)]
    Console(width=120).print(_table(rows, effort))
    if arguments.json:
        print(json.dumps({"benchmark": "absence", "effort": asdict(effort), "rows": [asdict(row) for row in rows]}))


def _table(rows: list[Row], effort: Effort) -> Table:
    columns = ("wait", "seed", "s", "outages", "trained", "tokens", "held-out loss", "above undisturbed")
    table = Table(
        *columns, title=f"away for {effort.away_s:g} s of every {effort.every_s:g} s; {effort.workers} workers"
    )
    of_seed = {row.seed: row.loss for row in rows if row.name == "undisturbed"}
    for row in rows:
        above = f"{row.loss / of_seed[row.seed] - 1:+.2%}"
        shown = (f"{row.seconds:.0f}", str(row.outages), f"{row.trained:.1%}", f"{row.tokens / 1e6:.2f} M")
        table.add_row(row.name, str(row.seed), *shown, f"{row.loss:.4f}", above)
    for name in ("always", "never"):
        own = [row for row in rows if row.name == name]
        trained = statistics.mean(row.trained for row in own)
        mean_above = statistics.mean(row.loss / of_seed[row.seed] - 1 for row in own)
        table.add_row(name, "mean", "", "", f"{trained:.1%}", "", "", f"{mean_above:+.2%}")
    return table


if __name__ == "__main__":
    main()
