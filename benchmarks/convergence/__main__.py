"""The command, and the measurement of a row: a coordinator and its workers, each a process."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

import benchmarks.convergence
from benchmarks.convergence.completion import completion, held_out
from benchmarks.convergence.results import RESULTS, Result, append, read, spec_digest
from benchmarks.convergence.rows import QUICK, QUICK_STEPS, ROWS, STEPS, Row
from benchmarks.convergence.table import table
from outerstep.demo import DemoPlan, trained
from outerstep.demo.spec import RUN
from outerstep.demo.summary import replicas_identical
from outerstep.live_view import display_for
from worker.export import load_checkpoint
from worker.link.client import Client


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=benchmarks.convergence.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} inner steps of {', '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="these rows", metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--steps", type=int, help=f"inner steps of each worker, whole rounds of each row; default {STEPS}"
    )
    parser.add_argument("--results", type=Path, default=None, help="default docs/convergence.jsonl; none with --quick")
    arguments = parser.parse_args(argv)
    if arguments.quick and arguments.steps is not None:
        parser.error(f"--quick has {QUICK_STEPS} inner steps: leave out --steps")
    steps = QUICK_STEPS if arguments.quick else STEPS if arguments.steps is None else arguments.steps
    path = arguments.results or (None if arguments.quick else RESULTS)
    names = arguments.only or (QUICK if arguments.quick else list(ROWS))
    if steps < 1:
        parser.error(f"--steps {steps}: it must be at least 1")
    for name in names:
        try:
            ROWS[name].spec(steps, 0)
        except ValueError as error:
            parser.error(f"{name}: {error}")
    results = list(_results(names, arguments.seeds, steps, path))
    Console(width=140).print(table(results))
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "convergence", **machine, "results": [asdict(each) for each in results]}))
    return 0 if all(result.identical for result in results) else 1


def _results(names: Sequence[str], seeds: Sequence[int], steps: int, path: Path | None) -> Iterator[Result]:
    """Yield the result of each row and seed: from `path` if it is there, otherwise measured and appended."""
    found = {each.spec: each for each in read(path)} if path is not None else {}
    for seed in seeds:
        for name in names:
            row = ROWS[name]
            result = found.get(spec_digest(row, steps=steps, seed=seed))
            if result is None:
                print(f"{name}, seed {seed}", file=sys.stderr)
                result = measure(name, row, steps=steps, seed=seed)
                if path is not None:
                    append(path, result)
            yield replace(result, row=name)


def measure(name: str, row: Row, *, steps: int, seed: int) -> Result:
    """Run the row. Raises ChildError if a process dies."""
    spec = row.spec(steps, seed)
    with (
        tempfile.TemporaryDirectory(prefix="outerstep-convergence-") as folder,
        trained(DemoPlan(row.processes, spec, Path(folder)), display_for(Console(file=sys.stderr))) as it,
    ):
        model = load_checkpoint(Client(it.client.http, RUN, it.admin_token))
        torch.set_num_threads(1)  # so small a model is slower with more threads
        end = completion(model, *held_out(it.run.spec), it.run.spec.data.sequence_length)
        rounds, workers = list(it.client.rounds(RUN)), list(it.client.workers(RUN))
    assert it.run.held_out_loss is not None
    h = it.run.spec.sync.inner_steps
    curve = [(each.round * h, round(each.held_out_loss, 4)) for each in reversed(rounds) if each.held_out_loss]
    curve.append((it.run.round * h, round(it.run.held_out_loss, 4)))
    return Result(
        name,
        seed,
        steps,
        spec_digest(row, steps=steps, seed=seed),
        round(it.run.held_out_loss, 4),
        curve,
        sum(each.upload_bytes for each in rounds) // row.processes,
        sum(each.delta_bytes for each in rounds),
        round(end.lines, 4),
        {kind: round(bits, 4) for kind, bits in end.by_kind.items()},
        replicas_identical(it.run, workers),
        round(it.seconds, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
