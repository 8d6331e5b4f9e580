"""One row: a coordinator and its workers, each a process, and what came of them."""

import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.convergence.completion import completion, held_out
from benchmarks.convergence.results import Result, spec_digest
from benchmarks.convergence.rows import Row
from outerstep.demo import DemoPlan, trained
from outerstep.demo.spec import RUN
from outerstep.demo.summary import replicas_identical
from outerstep.live_view import display_for
from worker.export import load_checkpoint
from worker.link.client import Client


def measure(name: str, row: Row, *, steps: int, seed: int) -> Result:
    """Run the row. Raises ChildError if a process dies."""
    spec = row.spec(steps, seed)
    with (
        tempfile.TemporaryDirectory(prefix="outerstep-convergence-") as folder,
        trained(DemoPlan(row.processes, spec, Path(folder)), display_for(Console(file=sys.stderr))) as it,
    ):
        model = load_checkpoint(Client(it.client.http, RUN, it.admin_token))
        torch.set_num_threads(1)  # so small a model is slower with several
        end = completion(model, *held_out(it.run.spec), it.run.spec.data.sequence_length)
        rounds, workers = list(it.client.rounds(RUN)), list(it.client.workers(RUN))
    assert it.run.held_out_loss is not None
    h = it.run.spec.sync.schedule_steps
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
