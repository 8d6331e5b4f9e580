"""What a run says of how long it will still take."""

import pytest

from harness.coordinator import InThread
from tests.coordinator.crew import crew, info, play_round

pytestmark = pytest.mark.slow


def read_rounds(shared: InThread, run: str) -> list[dict]:
    with shared.client() as reader:
        return list(reader.get(f"/v1/runs/{run}/rounds").raise_for_status().json()["items"])


def test_it_is_the_last_rounds_length_for_each_that_is_left(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b"], rounds=4, min_workers=2)
    play_round(members, 0)
    shared.await_state(run, 1)
    (first,) = (each for each in read_rounds(shared, run) if each["round"] == 0)
    length = first["closed_at"] - first["opened_at"]
    assert 2 * length <= info(shared, run)["eta_s"] <= 3 * length, "of the round that is open some may be over"
    for number in (1, 2, 3):
        play_round(members, number)
    shared.await_state(run, 4)
    assert (info(shared, run)["state"], info(shared, run)["eta_s"]) == ("finished", 0)
