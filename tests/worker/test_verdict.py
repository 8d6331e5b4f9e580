"""A worker whose contributions do not count: told why, in step with all others, and to the run's end."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread

NAMES = ["a", "b", "c", "d"]


def verdicts(run: Toy, round_: int) -> list[dict[str, Any]]:
    with run.coordinator.client() as http:
        document = http.get(f"/v1/runs/toy/rounds/{round_}").raise_for_status().json()
    return [fragment["verdicts"] for fragment in document["fragments"]]


def test_a_worker_that_climbs_is_left_out_and_told_and_stays_in_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sign of its learning rate is wrong: what it sends opposes what the others send."""
    caplog.set_level(logging.WARNING, "worker.rounds.exchange")
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3, min_workers=4, aggregation="screened"), tmp_path)
        run.workers(NAMES, d={"lr": lambda diloco: -toy.LR})
        info = run.final()
        assert {run.told(name).state_digest for name in NAMES} == {info.state_digest}
        for round_ in range(3):
            for fragment in verdicts(run, round_):
                assert {name: each["factor"] for name, each in fragment.items()} == {"a": 1, "b": 1, "c": 1, "d": 0}
        assert run.told("d").tokens == 0
        assert info.tokens == sum(run.told(name).tokens for name in "abc")
    told = [record.getMessage() for record in caplog.records]
    assert [each.split(";")[0] for each in told if "left out" in each] == [
        f"round {round_}: this worker's contribution was left out of the mean" for round_ in range(3)
    ]
