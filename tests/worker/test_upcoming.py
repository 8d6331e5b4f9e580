"""The look-ahead of a training loop: what `DiLoCo.upcoming()` names is what `units()` gives next."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client, open_http

pytestmark = pytest.mark.slow

STEPS = 6


@contextmanager
def training(directory: Path, text: str) -> Iterator[tuple[DiLoCo, nn.Module, torch.optim.Optimizer]]:
    """A worker of the toy run, the only one, for a loop of the test's own."""
    with coordinator_thread(directory / "coordinator") as coordinator, open_http(coordinator.url) as http:
        client = Client(http, "toy", Toy(coordinator, text, directory).token)
        model = toy.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=toy.LR)
        with DiLoCo(model, optimizer, client=client, run=client.run_detail(), name="a") as diloco:
            yield diloco, model, optimizer


def test_they_are_the_units_that_are_left_of_the_round(tmp_path: Path) -> None:
    units, named = [], []
    with training(tmp_path, toy.spec(rounds=2, steps=STEPS)) as (diloco, model, optimizer):
        first = list(diloco.upcoming())
        for unit in diloco.units():
            units.append(unit)
            named.append(list(diloco.upcoming()))
            toy.step(diloco, model, optimizer, unit)
        assert list(diloco.upcoming()) == []
    assert units == list(range(2 * STEPS))
    assert first == units[:STEPS]
    for index in range(2 * STEPS):
        end_of_round = (index // STEPS + 1) * STEPS
        assert named[index] == units[index + 1 : end_of_round]


@pytest.mark.parametrize("sync", ["overlap = 2", 'overlap = "eager"', 'offsets = "spread"\noverlap = 2'])
def test_with_an_overlap_the_next_round_is_named_before_this_one_ends(tmp_path: Path, sync: str) -> None:
    units, named = [], {}
    with training(tmp_path, toy.spec(rounds=3, steps=STEPS, sync=sync)) as (diloco, model, optimizer):
        for unit in diloco.units():
            units.append(unit)
            if diloco.inner_step == STEPS - 1 and diloco.round < 2:  # the last round has none after it
                wait_until(lambda: len(list(diloco.upcoming())) > 0)
                named[len(units)] = list(diloco.upcoming())
            toy.step(diloco, model, optimizer, unit)
    assert named == {start: units[start : start + STEPS] for start in (STEPS, 2 * STEPS)}


def test_a_worker_that_is_to_stop_has_none(tmp_path: Path) -> None:
    with training(tmp_path, toy.spec(steps=STEPS)) as (diloco, model, optimizer):
        for unit in diloco.units():
            assert len(list(diloco.upcoming())) == STEPS - 1
            diloco.client.stop.set()
            assert list(diloco.upcoming()) == []
            toy.step(diloco, model, optimizer, unit)
