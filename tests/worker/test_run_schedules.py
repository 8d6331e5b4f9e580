"""A script's learning rate schedule follows the run's step, and not how often this process has stepped."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedulers

from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.script.optimizers import RunSchedules

pytestmark = pytest.mark.slow

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
def test_any_step_has_the_value_of_that_step(make: Callable[[Optimizer], schedulers.LRScheduler]) -> None:
    optimizer, values = adam(), expected(make)
    schedules = RunSchedules(make(optimizer), [optimizer], TOTAL)
    optimizer.step()
    for step in (0, 1, 2, 5, 5, 6, 11, 4, 5, 0, 10):
        schedules.set(step)
        assert scheduled(optimizer) == values[step]


@EVERY
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
def test_what_cannot_follow_the_run_is_refused(
    give: Callable[[Optimizer], Any], error: type[Exception], told: str
) -> None:
    own = adam()
    with pytest.raises(error, match=told):
        RunSchedules(give(own), [own], TOTAL)


@pytest.mark.parametrize("steps_itself", [True, False], ids=["that the loop steps", ""])
def test_a_worker_that_joins_late_or_comes_again_has_the_rate_of_the_run(tmp_path: Path, steps_itself: bool) -> None:
    seen: dict[str, list[tuple[int, float]]] = {"a": [], "a again": [], "b": []}
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=4), tmp_path)

        def work(name: str, until: int) -> None:
            model = toy.make_model()
            optimizer = SGD(model.parameters(), lr=1e-3)
            scheduler = schedulers.CosineAnnealingLR(optimizer, 4 * toy.STEPS)
            who = name.removesuffix(" again")
            options = {"scheduler": scheduler, "state_dir": tmp_path / who}
            with run.connect(model, optimizer, name=who, **options) as diloco:
                optimizer.register_step_pre_hook(
                    lambda *_: seen[name].append((diloco.global_step, optimizer.param_groups[0]["lr"]))
                )
                for unit in diloco.units():
                    if diloco.global_step == until:
                        break
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
def test_a_scheduler_that_diloco_does_not_know_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str, given: dict[str, Any], warnings: int
) -> None:
    model = toy.make_model()
    optimizer = SGD(model.parameters(), lr=1e-3)
    with coordinator_thread(tmp_path / "coordinator") as coordinator, caplog.at_level(logging.WARNING, "worker"):
        run = Toy(coordinator, toy.spec(rounds=1), tmp_path)
        if when == "before":
            schedulers.StepLR(optimizer, 3)
        with run.connect(model, optimizer, **given) as diloco:
            if when == "after":
                schedulers.StepLR(optimizer, 3)
            for unit in diloco.units():
                toy.step(diloco, model, optimizer, unit)
    assert len([each for each in caplog.records if "scheduler=scheduler" in each.message]) == warnings


def test_a_restarted_script_keeps_the_settings_that_it_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And those that it changed on the way, as a scheduler of its own does, are the snapshot's."""
    used: list[tuple[float, float, tuple[float, float]]] = []
    with coordinator_thread(tmp_path / "coordinator") as coordinator, caplog.at_level(logging.WARNING, "worker"):
        run = Toy(coordinator, toy.spec(rounds=4), tmp_path)

        def work(until: int, **settings: Any) -> None:
            model = toy.make_model()
            optimizer = Adam(model.parameters(), **settings)
            with run.connect(model, optimizer, state_dir=tmp_path / "a") as diloco:
                group = optimizer.param_groups[0]
                used.append((group["lr"], group["weight_decay"], group["betas"]))
                for unit in diloco.units():
                    if diloco.global_step == until:
                        break
                    toy.step(diloco, model, optimizer, unit)
                    group["lr"] = 0.5e-3

        work(4, lr=1e-3)
        work(8, lr=1e-3)
        assert [each for each in caplog.records if each.name.startswith("worker")] == []
        work(12, lr=2e-3, betas=(0.8, 0.9))
        assert "lr = 0.002, before: 0.001; betas = (0.8, 0.9), before: (0.9, 0.999)" in caplog.text
    assert used == [(1e-3, 0, (0.9, 0.999)), (0.5e-3, 0, (0.9, 0.999)), (2e-3, 0, (0.8, 0.9))]


@pytest.mark.parametrize("peak", [1e-3, 2e-3])
def test_a_rate_that_a_scheduler_sets_is_no_changed_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, peak: float
) -> None:
    """transformers' Trainer restores optimizer and scheduler from a checkpoint before it joins: the rate was 0.0 when
    the first process joined, and is another one when the second does. A changed peak is reported."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator, caplog.at_level(logging.WARNING, "worker"):
        run = Toy(coordinator, toy.spec(rounds=3), tmp_path)
        checkpoint: list[dict[str, Any]] = []
        for until, base in ((4, 1e-3), (8, peak)):
            model = toy.make_model()
            optimizer = Adam(model.parameters(), lr=base)
            scheduler = schedulers.LambdaLR(optimizer, lambda step: step / 12)
            if checkpoint and base == 1e-3:
                optimizer.load_state_dict(checkpoint[0])
                scheduler.load_state_dict(checkpoint[1])
            with run.connect(model, optimizer, scheduler=scheduler, state_dir=tmp_path / "a") as diloco:
                for unit in diloco.units():
                    if diloco.global_step == until:
                        break
                    toy.step(diloco, model, optimizer, unit)
                checkpoint = [optimizer.state_dict(), scheduler.state_dict()]
    assert ("settings of Adam have changed" in caplog.text) == (peak != 1e-3)
    assert ("initial_lr = 0.002, before: 0.001" in caplog.text) == (peak != 1e-3)
