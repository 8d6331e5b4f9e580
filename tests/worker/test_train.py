"""The parts of the training loop that are plain functions. A script's learning rate schedule follows the run's step, and not
how often this process has stepped."""

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedulers
from transformers import get_cosine_schedule_with_warmup

from protocol.spec.run import RunSpec, parse_spec
from tests.worker import toy
from tests.worker.toy import MakeToy
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate
from worker.inner.schedules import SCHEDULES, Schedule, learning_rate
from worker.rounds.training import round_seed
from worker.script.optimizers import RunSchedules

CPU = torch.device("cpu")


def spec(source: str = "x", inner: str = "final_fraction = 0.1") -> RunSpec:
    return parse_spec(f"""
name = "r"
[model]
preset = "tiny"
[data]
source = {source!r}
sequence_length = 10
holdout = 0.5
[inner]
batch_size = 4
learning_rate = 2.0
warmup_steps = 10
{inner}
[sync]
wait = "always"
rounds = 11
inner_steps = 10
""")


def rate(step: int, inner: str = "final_fraction = 0.1") -> float:
    return learning_rate(spec(inner=inner), step, peak=2.0)


def test_learning_rate_is_keyed_to_global_steps() -> None:
    rates = [rate(step) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(2.0 * 0.55)
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rate(500) == pytest.approx(0.2)


def test_the_cosine_s_bits_are_those_that_runs_have_had() -> None:
    for step in range(10, 111):
        cosine = (1 + math.cos(math.pi * (step - 10) / 100)) / 2
        assert rate(step) == 2.0 * (0.1 + (1 - 0.1) * cosine)


def test_the_warmup_is_one_step_ahead_of_transformers() -> None:
    """docs/settings.md says so: (s + 1) / W of the peak, where transformers' schedules have s / W."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=100)
    (share,) = theirs.lr_lambdas
    assert share(0) == 0
    for step in range(10):
        assert rate(step) == pytest.approx(2.0 * share(step + 1)) == pytest.approx(2.0 * (step + 1) / 10)


@pytest.mark.parametrize(
    ("inner", "seen"),  # at steps 9, 10, 60, 85, 99 and 110 of 110, 10 of them warmup
    [
        ('schedule = "linear"\nfinal_fraction = 0.0', [2, 2, 1, 0.5, 0.22, 0]),
        ('schedule = "linear"\nfinal_fraction = 0.5', [2, 2, 1.5, 1.25, 1.11, 1]),
        ('schedule = "constant"', [2, 2, 2, 2, 2, 2]),
        ('schedule = "wsd"\nfinal_fraction = 0.0', [2, 2, 2, 2, 1, 0]),  # the last 22 steps
        ('schedule = "wsd"\ndecay_fraction = 0.5\nfinal_fraction = 0.0', [2, 2, 100 / 55, 50 / 55, 22 / 55, 0]),
        (
            'schedule = "wsd"\ndecay_fraction = 1.0\nfinal_fraction = 0.0',
            [2, 2, 1, 0.5, 0.22, 0],
        ),  # no more than is left
    ],
)
def test_the_other_schedules(inner: str, seen: list[float]) -> None:
    assert [rate(step, inner) for step in (9, 10, 60, 85, 99, 110)] == pytest.approx(seen)
    assert rate(5, inner) == 2.0 * 6 / 10
    assert rate(500, inner) == rate(110, inner)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warmup_that_is_the_whole_run(name: str) -> None:
    all_warmup = spec(inner=f'schedule = "{name}"').model_copy(
        update={"inner": spec().inner.model_copy(update={"warmup_steps": 110})}
    )
    assert [learning_rate(all_warmup, step, 1.0) for step in (0, 109)] == pytest.approx([1 / 110, 1])
    assert learning_rate(all_warmup, 110, 1.0) <= 1.0


def test_every_group_has_its_own_peak() -> None:
    """Also after a snapshot was loaded, which has the rates of the step that it is of."""
    slow, fast, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    two = torch.optim.SGD([{"params": [slow], "lr": 0.25}, {"params": [fast], "lr": 8.0}])
    one = torch.optim.AdamW([other], lr=2.0)
    schedule = Schedule(spec(), [two, one])
    saved = two.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = 1e-9
    two.load_state_dict(saved)
    schedule.set(60)
    rates = [group["lr"] for optimizer in (two, one) for group in optimizer.param_groups]
    assert rates == pytest.approx([0.25 * 0.55, 8.0 * 0.55, 2.0 * 0.55])
    schedule.set(4, scale=0.5)
    assert [group["lr"] for group in two.param_groups] == pytest.approx([0.25 / 4, 2.0])


def test_round_seeds_differ() -> None:
    seeds = {round_seed(seed, worker, number) for seed in (0, 1) for worker in ("a", "b") for number in range(3)}
    assert len(seeds) == 12
    assert all(0 <= seed < 1 << 63 for seed in seeds)


class Uniform(nn.Module):
    """Gives every byte the same probability, and remembers in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return torch.zeros(*tokens.shape, 256)


def test_evaluation(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"x" * 1000)
    data, model = TextData(spec(str(tmp_path))), Uniform()
    report = evaluate(model, data, 65, CPU)
    assert report.tokens == 60
    assert report.loss == pytest.approx(math.log(256))
    assert report.bytes == 60, "a token is a byte"
    assert model.modes == [False, False]
    assert model.training


# --- a script's own schedule ---------------------------------------------------------------------------------------


TOTAL = 12
MAKE: dict[str, Callable[[Optimizer], schedulers.LRScheduler]] = {
    "a function": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "from the value before": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, TOTAL),
    "of parts": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, TOTAL - 3)],
        [3],
    ),
    "with moments": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=TOTAL),
}
EVERY = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


def adam() -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": [nn.Parameter(torch.ones(2))]}]
    return Adam([*groups, {"params": [nn.Parameter(torch.ones(1))], "lr": 0.3}])


def scheduled(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def expected(make: Callable[[Optimizer], schedulers.LRScheduler]) -> list[list[dict[str, Any]]]:
    """What is scheduled at each step of a run from its beginning to its end."""
    optimizer = adam()
    scheduler, values = make(optimizer), []
    for _ in range(TOTAL):
        values.append(copy.deepcopy(scheduled(optimizer)))
        optimizer.step()
        if len(values) < TOTAL:
            scheduler.step()
    return values


@EVERY
@pytest.mark.slow
def test_any_step_has_the_value_of_that_step(make: Callable[[Optimizer], schedulers.LRScheduler]) -> None:
    optimizer, values = adam(), expected(make)
    schedules = RunSchedules(make(optimizer), [optimizer], TOTAL)
    optimizer.step()
    for step in (0, 1, 2, 5, 5, 6, 11, 4, 5, 0, 10):
        schedules.set(step)
        assert scheduled(optimizer) == values[step]


@EVERY
@pytest.mark.slow
def test_the_rates_that_a_snapshot_brings_do_not_matter(make: Callable[[Optimizer], schedulers.LRScheduler]) -> None:
    optimizer, other, values = adam(), adam(), expected(make)
    schedules = RunSchedules(make(optimizer), [optimizer], TOTAL)
    make(other)
    for group in other.param_groups:
        group["lr"] = 7.0
    optimizer.load_state_dict(other.state_dict())
    schedules.set(5)
    assert scheduled(optimizer) == values[5]


@pytest.mark.parametrize(
    ("give", "error", "told"),
    [
        (lambda own: schedulers.ReduceLROnPlateau(own), TypeError, "ReduceLROnPlateau, which does not depend on"),
        (lambda own: 0.1, TypeError, "scheduler is of type float"),
        (
            lambda own: MAKE["a function"](adam()),
            ValueError,
            "a LambdaLR, is not for an optimizer",
        ),
        (lambda own: schedulers.OneCycleLR(own, 0.5, total_steps=11), ValueError, "for 11 steps, but the run has 12"),
        (
            lambda own: schedulers.SequentialLR(
                own,
                [schedulers.OneCycleLR(own, 0.5, total_steps=4), schedulers.OneCycleLR(own, 0.5, total_steps=7)],
                [4],
            ),
            ValueError,
            "for 11 steps",
        ),
    ],
)
@pytest.mark.slow
def test_what_cannot_follow_the_run_is_refused(
    give: Callable[[Optimizer], Any], error: type[Exception], told: str
) -> None:
    own = adam()
    with pytest.raises(error, match=told):
        RunSchedules(give(own), [own], TOTAL)


@pytest.mark.parametrize("steps_itself", [True, False], ids=["that the loop steps", ""])
@pytest.mark.slow
def test_a_worker_that_joins_late_or_comes_again_has_the_rate_of_the_run(
    toy_run: MakeToy, tmp_path: Path, steps_itself: bool
) -> None:
    seen: dict[str, list[tuple[int, float]]] = {"a": [], "a again": [], "b": []}
    run = toy_run(toy.spec(rounds=4))

    def work(name: str, until: int) -> None:
        model, optimizer = toy.model_and_optimizer(SGD, lr=1e-3)
        scheduler = schedulers.CosineAnnealingLR(optimizer, 4 * toy.STEPS)
        who = name.removesuffix(" again")
        options = {"scheduler": scheduler, "state_dir": tmp_path / who}
        with run.connect(model, optimizer, name=who, **options) as diloco:
            optimizer.register_step_pre_hook(
                lambda *_: seen[name].append((diloco.global_step, optimizer.param_groups[0]["lr"]))
            )
            for unit in toy.units_until(diloco, until):
                toy.step(diloco, model, optimizer, unit)
                if steps_itself:
                    scheduler.step()

    work("a", toy.STEPS)
    work("b", 2 * toy.STEPS)
    work("a again", 4 * toy.STEPS)
    reference = SGD([nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler, rates = schedulers.CosineAnnealingLR(reference, 4 * toy.STEPS), []
    for _ in range(4 * toy.STEPS):
        rates.append(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()
    steps = {name: [step for step, _ in each] for name, each in seen.items()}
    assert steps == {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7], "a again": list(range(8, 16))}
    assert all(rate == rates[step] for each in seen.values() for step, rate in each)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("given", "warnings"), [({}, 1), ({"scheduler": []}, 0)], ids=["", "that follows the run"])
@pytest.mark.slow
def test_a_scheduler_that_diloco_does_not_know_is_warned_of_once(
    toy_run: MakeToy, caplog: pytest.LogCaptureFixture, when: str, given: dict[str, Any], warnings: int
) -> None:
    model, optimizer = toy.model_and_optimizer(SGD, lr=1e-3)
    with caplog.at_level(logging.WARNING, "worker"):
        run = toy_run(toy.spec(rounds=1))
        if when == "before":
            schedulers.StepLR(optimizer, 3)
        with run.connect(model, optimizer, **given) as diloco:
            if when == "after":
                schedulers.StepLR(optimizer, 3)
            for unit in diloco.units():
                toy.step(diloco, model, optimizer, unit)
    assert len([each for each in caplog.records if "scheduler=scheduler" in each.message]) == warnings


@pytest.mark.slow
def test_a_restarted_script_keeps_the_settings_that_it_changed(
    toy_run: MakeToy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And those that it changed on the way, as a scheduler of its own does, are the snapshot's."""
    used: list[tuple[float, float, tuple[float, float]]] = []
    with caplog.at_level(logging.WARNING, "worker"):
        run = toy_run(toy.spec(rounds=4))

        def work(until: int, **settings: Any) -> None:
            model, optimizer = toy.model_and_optimizer(Adam, **settings)
            with run.connect(model, optimizer, state_dir=tmp_path / "a") as diloco:
                group = optimizer.param_groups[0]
                used.append((group["lr"], group["weight_decay"], group["betas"]))
                for unit in toy.units_until(diloco, until):
                    toy.step(diloco, model, optimizer, unit)
                    group["lr"] = 0.5e-3

        work(4, lr=1e-3)
        work(8, lr=1e-3)
        assert [each for each in caplog.records if each.name.startswith("worker")] == []
        work(12, lr=2e-3, betas=(0.8, 0.9))
        assert "lr = 0.002, before: 0.001; betas = (0.8, 0.9), before: (0.9, 0.999)" in caplog.text
    assert used == [(1e-3, 0, (0.9, 0.999)), (0.5e-3, 0, (0.9, 0.999)), (2e-3, 0, (0.8, 0.9))]


@pytest.mark.parametrize("peak", [1e-3, 2e-3])
@pytest.mark.slow
def test_a_rate_that_a_scheduler_sets_is_no_changed_setting(
    toy_run: MakeToy, tmp_path: Path, caplog: pytest.LogCaptureFixture, peak: float
) -> None:
    """transformers' Trainer restores optimizer and scheduler from a checkpoint before it joins: the rate was 0.0 when
    the first process joined, and is another one when the second does. A changed peak is reported."""
    with caplog.at_level(logging.WARNING, "worker"):
        run = toy_run(toy.spec(rounds=3))
        checkpoint: list[dict[str, Any]] = []
        for until, base in ((4, 1e-3), (8, peak)):
            model, optimizer = toy.model_and_optimizer(Adam, lr=base)
            scheduler = schedulers.LambdaLR(optimizer, lambda step: step / 12)
            if checkpoint and base == 1e-3:
                optimizer.load_state_dict(checkpoint[0])
                scheduler.load_state_dict(checkpoint[1])
            with run.connect(model, optimizer, scheduler=scheduler, state_dir=tmp_path / "a") as diloco:
                for unit in toy.units_until(diloco, until):
                    toy.step(diloco, model, optimizer, unit)
                checkpoint = [optimizer.state_dict(), scheduler.state_dict()]
    assert ("settings of Adam have changed" in caplog.text) == (peak != 1e-3)
    assert ("initial_lr = 0.002, before: 0.001" in caplog.text) == (peak != 1e-3)
