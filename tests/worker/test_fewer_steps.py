"""A worker that comes late is asked for fewer inner steps than it was given units: it hands in those that it did."""

import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.link.client import Client

pytestmark = pytest.mark.slow


class Hurried(Client):
    """Is told to do `steps` inner steps only in round 0."""

    def __init__(self, *arguments: Any, steps: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps = steps

    def assignment(self, *arguments, **options):
        answer = super().assignment(*arguments, **options)
        return answer.model_copy(update={"inner_steps": self._steps}) if answer.round == 0 else answer


def test_fewer_inner_steps_hand_in_the_first_units_and_the_others_are_trained_on_later(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3), tmp_path)
        done = run.worker("a", client_class=partial(Hurried, steps=3))
        assert run.final().state_digest is not None
        with coordinator.client() as http:
            rounds = http.get("/v1/runs/toy/rounds").raise_for_status().json()["items"]
        with sqlite3.connect(tmp_path / "coordinator" / "outerstep.db") as database:
            units = database.execute("SELECT start, stop, state FROM unit_ranges ORDER BY start").fetchall()
    tokens = {each["round"]: each["tokens"] for each in rounds}
    # The step that round 0 lacked is done in a fourth round.
    assert [tokens[number] // done.spec.unit_tokens for number in range(4)] == [3, toy.STEPS, toy.STEPS, 1]
    # Unit 3 was given out again, before any new one: 12 inner steps, 12 units, none of them left out.
    assert {state for _, _, state in units} == {"consumed"}
    assert (units[0][0], units[-1][1]) == (0, 12)
