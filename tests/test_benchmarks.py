"""The benchmarks, at sizes that say nothing about speed: what they print is complete. And how they are named."""

import asyncio
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import gpu
from benchmarks.boxes.loop import together
from benchmarks.boxes.rows import QUICK, equal_length, search, spec_of
from benchmarks.control_plane import measure
from benchmarks.convergence import rows as convergence
from benchmarks.frontier import rows as frontier
from benchmarks.frontier.model import Replicas
from benchmarks.frontier.training import Training
from benchmarks.replica import Replica
from harness.coordinator import coordinator_process
from protocol.spec.run import parse_spec
from protocol.wire import CHUNK_ELEMENTS
from tests.support.python import python
from worker.data.open_training_set import TextData
from worker.inner.loss import mean_loss
from worker.models.building import build_model

ROOT = Path(__file__).parents[1]


def test_pages_name_benchmarks_as_they_are_run() -> None:
    """As modules: as a file, one finds its neighbours only where the project is installed. The log may name benchmarks
    that have been deleted since."""
    sources = {f"benchmarks.{path.stem}": path for path in (ROOT / "benchmarks").glob("*.py")}
    for package in ("boxes", "convergence", "frontier", "peers", "wan"):
        sources[f"benchmarks.{package}"] = ROOT / "benchmarks" / package / "__main__.py"
    texts = {name: path.read_text() for name, path in sources.items()}
    docs = [path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"]
    pages = [path.read_text() for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *docs)]
    everything = "\n".join([*texts.values(), *pages])
    assert not re.search(r"python3? benchmarks/", everything)
    run = {name for name, text in texts.items() if "__main__" in text}
    assert set(re.findall(r"python3? -m (benchmarks\.\w+)", everything)) == run


def test_what_a_sync_costs_a_gpu_is_measured() -> None:
    found = gpu.measure("int8", 2 * CHUNK_ELEMENTS + 5, torch.device("cpu"))
    assert [each.operation for each in found] == ["quantise", "to the host", "outer step", "to the GPU"]
    assert all(each.seconds > 0 and each.share > 0 for each in found)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the peak")
def test_the_memory_of_a_worker_is_measured_by_its_settings() -> None:
    default, leanest = json.loads(python("-m", "benchmarks.memory", "--quick", "--json").stdout)
    assert 12 < leanest["per_parameter"] < default["per_parameter"] - 5, "5 for work and libraries, 16 for what is kept"


@pytest.mark.nightly
def test_a_small_crowd_goes_through_its_rounds() -> None:
    with coordinator_process() as running:
        report = asyncio.run(measure(running, workers=8, round_s=0.5, viewers=3, pages=True))
    kinds = report["kinds"]
    assert report["missed_leases"] == 0
    assert kinds["contribute"]["count"] == 2 * 8
    answered = sum(kinds[kind]["count"] for kind in ("woken", "asked") if kind in kinds)
    assert answered == (3 + 2) * 8, "assignments of three rounds, deltas of two"
    assert kinds["heartbeat"]["count"] > 0
    assert kinds["look"]["count"] >= 3
    assert 0 < kinds["heartbeat"]["p50_ms"] <= kinds["heartbeat"]["p99_ms"]


@pytest.mark.nightly
def test_a_rule_in_conversations_is_trained_and_asked_for() -> None:
    """In so few steps that nothing is learned: the base, two runs with two workers each, and their answers."""
    pytest.importorskip("peft", reason="needs: pip install 'outerstep[peft]'")
    done = python("-m", "benchmarks.fine_tuning", "--quick")
    assert done.returncode == 0, done.stderr
    table = re.findall(r"^\| (?:train_on = )?\"?(\w+)\"? \| 0 \| [\d.]+% \|", done.stdout, re.MULTILINE)
    assert table == ["base", "assistant", "all"]


@pytest.mark.parametrize(
    ("losses", "shares"),
    [
        ([(0.6, 2.1), (0.8, 1.9)], 0.7),
        ([(0.8, 1.9), (0.6, 2.0)], 0.6),  # measured in any order
        ([(0.5, 2.1), (0.6, 2.05), (0.9, 1.75)], 0.65),
        ([(0.6, 1.9), (0.8, 1.8)], None),
        ([(0.6, 2.3), (0.8, 2.1)], None),
    ],
)
def test_the_length_with_a_loss_lies_between_two_measured_ones(
    losses: list[tuple[float, float]], shares: float | None
) -> None:
    found = equal_length(2.0, losses)
    assert found == (None if shares is None else pytest.approx(shares))


@pytest.mark.parametrize("first", [0.3, 0.62, 1.1])
def test_lengths_are_tried_until_the_loss_lies_between_two(first: float) -> None:
    tried: list[float] = []

    def loss(length: float) -> float:
        tried.append(length)
        return 3 - length

    assert search(2.38, first, loss) == pytest.approx(0.62)
    assert min(tried) <= 0.62 <= max(tried)
    assert search(1.0, 0.5, lambda length: 2.0) is None
    assert search(1.0, 0.5, lambda length: math.inf) is None


@pytest.mark.slow
def test_a_box_does_the_inner_steps_for_which_a_round_has_time() -> None:
    """In 4 rounds of 5 steps, a box of speed 1/3 does 6."""
    loss, steps = together(spec_of(QUICK, 4, 0), [1.0, 1 / 3])
    assert steps == 4 * 5 + 6
    assert 0 < loss < math.log(256) + 1


@pytest.mark.nightly
def test_what_a_second_box_gives_is_measured() -> None:
    done = python("-m", "benchmarks.boxes", "real", "--quick", "--boxes", "1,1/2", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["finished"]
    assert min(row["contributions"]) > 0
    assert row["tokens"] > 0


def test_stacked_replicas_have_the_losses_and_gradients_of_the_model() -> None:
    spec = parse_spec(convergence.Row().spec(50, 0))
    model = build_model(spec, torch.device("cpu"))
    replicas = Replicas(model, 3)
    start = parameters_to_vector(model.parameters()).detach()
    generator = torch.Generator().manual_seed(1)
    vectors = start + 0.01 * torch.randn(3, len(start), generator=generator)
    batches = torch.randint(0, 256, (3, 2, 65), generator=generator)
    stacked = replicas.stacked(vectors)
    losses = replicas.losses(stacked, batches)
    losses.sum().backward()
    for index, batch in enumerate(batches):
        vector_to_parameters(vectors[index].clone(), model.parameters())
        loss = mean_loss(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert losses[index].item() == pytest.approx(loss.item(), rel=1e-5)
        for name, gradient in zip(replicas.names, gradients, strict=True):
            ours = stacked[name].grad
            assert ours is not None
            assert torch.allclose(ours[index], gradient, rtol=1e-3, atol=1e-6), name
    assert torch.equal(replicas.flat(stacked), vectors)


@pytest.mark.slow
@pytest.mark.parametrize("h", [None, 2], ids=["synchronous", "DiLoCo"])
def test_the_frontier_s_loop_trains_as_workers_do(h: int | None) -> None:
    """By the worker's inner step, and torch's Nesterov momentum as the outer step (arXiv 2311.08105, algorithm 1)."""
    torch.set_num_threads(1)
    steps, workers, usual = 4, frontier.WORKERS, frontier.USUAL
    spec = parse_spec(convergence.Row(keys={"inner.optimizer": "muon", "sync.inner_steps": steps}).spec(steps, 3))
    data: Any = TextData(spec)
    training = Training(spec, 1 if h is None else workers)
    start, theta = training.theta.clone(), nn.Parameter(training.theta.clone())
    if h is None:
        joined: Any = SimpleNamespace(
            unit=lambda step: torch.cat([data.unit(workers * step + k) for k in range(workers)])
        )
        replica = Replica(spec, joined)
        replica.train(range(steps), 0)
        reached = parameters_to_vector(replica.model.parameters()).detach()
        training.train_synchronously(steps, workers)
    else:
        replicas = [Replica(spec, data) for _ in range(workers)]
        outer = torch.optim.SGD([theta], usual.learning_rate, usual.momentum, nesterov=True)
        for first in range(0, steps, h):
            for rank, replica in enumerate(replicas):
                vector_to_parameters(theta.detach().clone(), replica.model.parameters())
                replica.train(range(workers * first + rank, workers * (first + h), workers), first)
            ends = [parameters_to_vector(each.model.parameters()).detach() for each in replicas]
            theta.grad = theta.detach() - torch.stack(ends).mean(0)
            outer.step()
            training.round(h, "fp32", "fp32", usual)
        # What is evaluated is one step of the momentum ahead.
        reached = theta.detach() + usual.learning_rate * usual.momentum * outer.state[theta]["momentum_buffer"]
    difference = torch.linalg.norm(training.point() - reached)
    assert difference < 0.05 * torch.linalg.norm(reached - start)  # Muon computes in bf16


def test_the_rounds_of_a_row_of_the_frontier_have_all_steps() -> None:
    for name, row in frontier.ROWS.items():
        rounds = row.rounds(3000)
        assert sum(rounds) == 3000, name
        assert min(rounds) > 0, name
    growing = frontier.ROWS["int4 up, H 25 to 100"].rounds(3000)
    assert growing == sorted(growing)
    assert growing[0] < 30
    assert growing[-1] > 95
