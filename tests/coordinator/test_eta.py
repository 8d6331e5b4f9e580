"""What a run says of how long it will still take."""

from harness.coordinator import InThread, SettableClock
from tests.coordinator.crew import GRACE_OF_A_SECOND, crew, info, play_round


def read_rounds(shared: InThread, run: str) -> list[dict]:
    with shared.client() as reader:
        return list(reader.get(f"/v1/runs/{run}/rounds").raise_for_status().json()["items"])


def steer(shared: InThread, run: str, state: str) -> None:
    with shared.client() as admin:
        admin.patch(f"/v1/runs/{run}", json={"state": state}).raise_for_status()


def test_nobody_knows_before_a_round_and_while_no_other_is_to_open(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b"], rounds=4, min_workers=2)
    assert info(shared, run)["eta_s"] is None
    play_round(members, 0)
    shared.await_state(run, 1)
    assert info(shared, run)["eta_s"] is not None
    steer(shared, run, "paused")
    assert info(shared, run)["eta_s"] is None
    steer(shared, run, "running")
    assert info(shared, run)["eta_s"] is not None
    steer(shared, run, "stopped")
    assert info(shared, run)["eta_s"] == 0


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


def test_a_round_says_when_it_closes(shared: InThread, run: str, clock: SettableClock) -> None:
    """Its fragments alone did, so that whoever shows a run had to ask for each round as well."""
    members = crew(shared, run, ["a", "b", "c"], rounds=2, min_workers=2, members=GRACE_OF_A_SECOND)
    for member in members:
        member.assignment(0)
    (opened,) = read_rounds(shared, run)
    assert opened["closes_in_s"] is None, "no deadline before a quorum has contributed"
    for member in members[:2]:
        member.take_part(0)
    (open_,) = read_rounds(shared, run)
    assert (open_["closes_in_s"], open_["reason"]) == (1, "waiting for 1 of 3 workers (c); closes in 1 s")
    steer(shared, run, "stopped")
    (given_up,) = read_rounds(shared, run)
    assert given_up["closes_in_s"] is None
