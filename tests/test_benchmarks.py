"""The benchmarks of the control plane and of preparing, at sizes that say nothing about speed: what they print is complete.
And how all of them are named."""

import asyncio
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import gpu, inner_steps, loop, prepare
from benchmarks.boxes.loop import together
from benchmarks.boxes.rows import QUICK, equal_length, search, spec_of
from benchmarks.control_plane import measure
from benchmarks.convergence import rows as convergence
from benchmarks.faults import Replica
from benchmarks.floor import core_seconds
from benchmarks.frontier import bare
from benchmarks.frontier import rows as frontier
from benchmarks.frontier.model import Replicas
from benchmarks.frontier.training import Training
from benchmarks.robust import real
from benchmarks.robust.ascent import Ascent, Plan
from benchmarks.robust.real import Row, Size
from harness.coordinator import coordinator_process
from protocol.spec.run import parse_spec
from protocol.wire import CHUNK_ELEMENTS
from tests.support.waiting import PATIENCE_S
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate
from worker.inner.loss import mean_loss
from worker.models.building import build_model
from worker.state.outer_state import OuterState

ROOT = Path(__file__).parents[1]
CAPTURED: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}


def test_pages_name_benchmarks_as_they_are_run() -> None:
    """As modules: as a file, one finds its neighbours only where the project is installed. The log may name benchmarks
    that have been deleted since."""
    sources = {f"benchmarks.{path.stem}": path for path in (ROOT / "benchmarks").glob("*.py")}
    for package in ("boxes", "convergence", "frontier", "peers", "robust", "siege", "wan"):
        sources[f"benchmarks.{package}"] = ROOT / "benchmarks" / package / "__main__.py"
    texts = {name: path.read_text() for name, path in sources.items()}
    docs = [path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"]
    pages = [path.read_text() for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *docs)]
    everything = "\n".join([*texts.values(), *pages])
    assert not re.search(r"python3? benchmarks/", everything)
    run = {name for name, text in texts.items() if "__main__" in text}
    assert set(re.findall(r"python3? -m (benchmarks\.\w+)", everything)) == run - {"benchmarks.loop_ranks"}


def test_the_floor_of_a_sync_has_core_seconds_for_every_part() -> None:
    parts = core_seconds(2 * CHUNK_ELEMENTS + 5, 3)
    assert set(parts) == {"encode", "average", "outer step", "digests", "sockets", "disk"}
    assert all(seconds > 0 for seconds in parts.values())


def test_what_a_sync_costs_a_gpu_is_measured() -> None:
    found = gpu.measure("int8", 2 * CHUNK_ELEMENTS + 5, torch.device("cpu"))
    assert [each.operation for each in found] == ["quantise", "to the host", "outer step", "to the GPU"]
    assert all(each.seconds > 0 and each.share > 0 for each in found)


def test_inner_steps_are_measured_by_settings_of_the_worker() -> None:
    spec = inner_steps.SPEC.format(preset="tiny", batch_size=4, sequence_length=64)
    row = inner_steps.measure("micro-batch 4", spec, "cpu")
    assert row.at_once == 4
    assert row.tokens_s == pytest.approx(4 * 64 / row.step_s)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the peak")
def test_the_memory_of_a_worker_is_measured_by_its_settings() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--quick", "--json"]
    default, leanest = json.loads(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S).stdout
    )
    assert 12 < leanest["per_parameter"] < default["per_parameter"] - 5, "5 for work and libraries, 16 for what is kept"


def test_preparing_is_measured_beside_datasets_where_that_is_installed() -> None:
    report = prepare.measure(300_000, processes=1, repeats=1)
    assert report["text_bytes"] >= 300_000
    there = importlib.util.find_spec("datasets") is not None
    assert set(report["seconds"]) == set(report["tokens"]) == {"outerstep", *(["datasets"] if there else [])}
    counts = list(report["tokens"].values())
    assert 50_000 < min(counts) <= max(counts) < min(counts) + 10, "but for where a long document is cut"
    for name, spent in report["seconds"].items():
        assert report["mb_per_second_per_process"][name] == pytest.approx(report["text_bytes"] / 1e6 / spent)
        assert name in prepare.table(report)
    assert (report["ratio"] is not None) == there


@pytest.mark.nightly
def test_the_loop_of_a_worker_is_compared_with_a_bare_one() -> None:
    command = [sys.executable, "-m", "benchmarks.loop", "--quick", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (tiny,) = report["results"]
    assert (tiny["size"], tiny["parameters"], tiny["tokens_per_step"]) == ("tiny", 139_584, 512)
    assert tiny["segments"] == loop.ROUNDS * loop.QUICK["tiny"].segments
    assert tiny["worker_tokens_per_second"] > 0 < tiny["bare_tokens_per_second"]
    low, high = tiny["quartiles"]
    assert 0 < low <= tiny["ratio"] <= high
    assert tiny["cpu"] > 0
    assert "tokens/s" in done.stdout


@pytest.mark.nightly
def test_the_loop_of_several_processes_is_compared_with_a_bare_one_of_as_many() -> None:
    command = [sys.executable, "-m", "benchmarks.loop", "--quick", "--json", "--ranks", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [each["size"] for each in results] == ["tiny, 2 ranks, ddp", "tiny, 2 ranks, fsdp"]
    for each in results:
        assert each["segments"] == loop.ROUNDS * loop.QUICK["tiny"].segments
        assert 0 < each["quartiles"][0] <= each["ratio"] <= each["quartiles"][1]


@pytest.mark.nightly
def test_projected_gradient_ascent_stays_within_the_bounds_of_screening_and_raises_the_loss() -> None:
    size = Size(rounds=2, inner_steps=8, evaluation_tokens=4096)
    spec = parse_spec(real.spec_of(Row("a", Plan()), size, seed=0, guard="tell"))
    replica = Replica(spec, data := TextData(spec))
    state = OuterState(replica.layout, spec.outer, pin_memory=False)
    state.take(replica.fragments)
    replica.begin(state)
    replica.train(range(8), first_step=40)
    honest = [replica.fragments.pseudo_gradient(p, theta) for p, theta in enumerate(state.theta)]

    def loss(others: float, sent: list[torch.Tensor]) -> float:
        for p, (own, values) in enumerate(zip(honest, sent, strict=True)):
            replica.fragments.scatter(p, state.theta[p] - others * own - 0.25 * values)
        return evaluate(replica.model, data, 4096, torch.device("cpu")).loss

    sent = {
        name: Ascent(plan, spec, data, replica.layout, hostile=1, workers=4).updates(0, state, honest)
        for name, plan in {"attack": Plan(0.5), "slow": Plan(0.5, rise=0.0), "other round": Plan(0.5, only=1)}.items()
    }
    for own, attack in zip(honest, sent["attack"], strict=True):
        assert float(attack.norm() / own.norm()) == pytest.approx(1.2, rel=0.02), "as its int8 is received"
        assert float(torch.cosine_similarity(attack, own, dim=0)) == pytest.approx(0.5, abs=0.01)
    start = loss(-0.25, honest)
    assert loss(0.75, honest) < start - 0.2
    assert loss(0.75, sent["attack"]) > start + 0.1
    assert loss(0.75, sent["slow"]) < start + 0.02
    assert all(torch.equal(own, values) for own, values in zip(honest, sent["other round"], strict=True))


@pytest.mark.nightly
def test_hostile_workers_are_compared_with_honest_ones() -> None:
    """At a size at which losses say nothing: who counted, and that a run which cannot go on is told as one."""
    command = [sys.executable, "-m", "benchmarks.robust", "--quick", "--json", "--attacks", "x1e6,zeros"]
    done = subprocess.run([*command, "--hostile", "1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["rule"], row["attack"]): row for row in report["rows"]}
    assert set(rows) == {
        (rule, attack) for rule in ("mean", "screened") for attack in ("nobody", "away", "x1e6", "zeros")
    }
    assert rows["mean", "x1e6"]["loss"] is None, "the plain mean stands a million times"
    assert rows["screened", "x1e6"]["loss"] < 10
    for row in rows.values():
        assert row["refused"] == 0
        assert row["left_out"] == (row["attacking"] if row["rule"] == "screened" else 0)
    assert set(report["times_s"]["int8"]) == {"screened", "clipped", "mean", "checked", "found"}


@pytest.mark.nightly
def test_workers_train_while_their_coordinator_is_attacked() -> None:
    """For a few seconds, which say nothing about speed: that each attack is made, refused, and over with its row."""
    names = ["join of a million objects", "4 readers of 1,000 rounds", "1,100 idle connections"]
    command = [sys.executable, "-m", "benchmarks.siege", "--quick", "--json", "--only", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["attack"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert list(rows) == names
    for row in rows.values():
        assert all(
            row[span]["rounds_per_s"] > 0 and row[span]["peak_rss"] > 0 for span in ("before", "during", "after")
        )
        assert row["lost_leases"] == 0
        assert row["larger"] < 2
        assert row["attack"] in done.stdout
    assert set(rows[names[0]]["answered"]) <= {"413", "429"}
    assert rows[names[1]]["answered"]["200"] > 0
    assert sum(rows[names[2]]["answered"].values()) > 0, "they are closed"


class Taken:
    """A clock for turns of which nothing takes time but what the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


def test_turns_leave_out_the_sync_and_compare_with_the_bare_segments_around(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, bare_s = Taken(), iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "process_time", lambda: clock.seconds / 2)

    def bare() -> loop.Seconds:
        began = loop.Seconds.now()
        clock.pass_by(next(bare_s))
        return loop.Seconds.now().since(began)

    turns = loop.Turns(loop.Size("", 1, 1, segment=2, segments=2), bare)
    for _ in range(2):
        for inner_step in range(6):
            clock.pass_by(100 if inner_step in (0, 5) else 10)  # the first and the last have parts of the sync
            turns()
    assert turns.worker == [(20, 10)] * 4
    assert [(before.wall, after.wall) for before, after in turns.around] == [(1, 2), (2, 3), (4, 5), (5, 6)]
    assert turns.ratios("wall") == turns.ratios("cpu") == [1.5 / 20, 2.5 / 20, 4.5 / 20, 5.5 / 20]


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
    command = [sys.executable, "-m", "benchmarks.fine_tuning", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = re.findall(r"^\| (?:train_on = )?\"?(\w+)\"? \| 0 \| [\d.]+% \|", done.stdout, re.MULTILINE)
    assert table == ["base", "assistant", "all"]


@pytest.mark.nightly
def test_what_an_absent_coordinator_costs_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.absence", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert list(rows) == ["always", "never", "undisturbed"]
    assert rows["undisturbed"]["outages"] == 0
    assert rows["never"]["tokens"] >= rows["always"]["tokens"] > 0
    assert all(0 < row["trained"] < 1 and row["loss"] > 0 for row in rows.values())


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


def test_a_box_does_the_inner_steps_for_which_a_round_has_time() -> None:
    """In 4 rounds of 5 steps, a box of speed 1/3 does 6."""
    loss, steps = together(spec_of(QUICK, 4, 0), [1.0, 1 / 3])
    assert steps == 4 * 5 + 6
    assert 0 < loss < math.log(256) + 1


@pytest.mark.nightly
def test_what_a_second_box_gives_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.boxes"]
    done = subprocess.run([*command, "real", "--quick", "--boxes", "1,1/2", "--json"], **CAPTURED)
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


@pytest.mark.parametrize("h", [None, 2], ids=["synchronous", "DiLoCo"])
def test_the_bare_loop_trains_as_the_frontier_s(h: int | None) -> None:
    torch.set_num_threads(1)
    steps, workers = 4, frontier.WORKERS
    spec = parse_spec(convergence.Row(keys={"inner.optimizer": "muon", "sync.inner_steps": steps}).spec(steps, 3))
    model, training = bare.initial_model(3), Training(spec, 1 if h is None else workers)
    start = parameters_to_vector(model.parameters()).detach().clone()
    assert torch.equal(start, training.theta)
    if h is None:
        bare.train_synchronously(model, TextData(spec), steps)
        training.train_synchronously(steps, workers)
    else:
        bare.train_by_diloco(model, TextData(spec), steps, h)
        for _ in range(steps // h):
            training.round(h, "fp32", "fp32", frontier.USUAL)
    ours, theirs = parameters_to_vector(model.parameters()) - start, training.point() - start
    assert torch.linalg.norm(ours - theirs) < 0.05 * torch.linalg.norm(theirs)  # Muon computes in bf16


def test_the_rounds_of_a_row_of_the_frontier_have_all_steps() -> None:
    for name, row in frontier.ROWS.items():
        rounds = row.rounds(3000)
        assert sum(rounds) == 3000, name
        assert min(rounds) > 0, name
    growing = frontier.ROWS["int4 up, H 25 to 100"].rounds(3000)
    assert growing == sorted(growing)
    assert growing[0] < 30
    assert growing[-1] > 95


@pytest.mark.nightly
def test_hostile_workers_of_a_real_run_are_compared_with_their_absence(tmp_path: Path) -> None:
    """At a size at which losses say nothing: who counted, what ended how, and that a second call plays nothing again."""
    rows = ["C = 0.5", "late", "free rider", "backdoor in 1 of 8"]
    command = [sys.executable, "-m", "benchmarks.robust", "real", "--quick", "--json", "--guard", "tell"]
    command += ["--results", str(tmp_path / "results"), "--rows", *rows]
    found = json.loads(subprocess.run(command, **CAPTURED).stdout.splitlines()[-1])
    assert set(found) == {*rows, "absent: 1 of 4"}
    for each in found.values():
        assert (each["state"], each["round"], len(each["losses"])) == ("finished", 3, 4)
        assert set(each["left_out"]) <= {"w0"}
    assert found["free rider"]["credit"] < 1, "the loss is lower without it"
    began = time.monotonic()
    assert json.loads(subprocess.run(command, **CAPTURED).stdout.splitlines()[-1]) == found
    assert time.monotonic() - began < sum(each["seconds"] for each in found.values())
