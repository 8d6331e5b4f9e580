"""A round that closes without a straggler, by a clock that the tests move, and what becomes of its work."""

import pytest

from harness.coordinator import InThread, SettableClock
from tests.coordinator.crew import GRACE_OF_A_SECOND, assigned, crew, events, info, play_round, problem, step_all

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c"]


@pytest.mark.covers("reliability:rounds-close")
def test_a_round_closes_without_the_straggler_once_quorum_and_grace_have_passed(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    a, b, c = crew(shared, run, NAMES, members=GRACE_OF_A_SECOND)
    c.assignment(0)
    b.assignment(0)
    a.take_part(0)
    clock.advance(50)
    shared.coordinator.tick()
    assert info(shared, run, "/rounds/0")["fragments"][0]["closes_in_s"] == 14_400 - 50, "no quorum, only the cap"
    b.take_part(0)
    fragment = info(shared, run, "/rounds/0")["fragments"][0]
    assert (fragment["state"], fragment["closes_in_s"]) == ("collecting", 1)
    assert fragment["reason"] == "waiting for 1 of 3 workers (c); closes in 1 s"
    assert info(shared, run)["reason"] == "round 0: waiting for 1 of 3 workers (c); closes in 1 s"
    clock.advance(1)
    shared.coordinator.tick()
    assert a.delta(0, 0).status_code == a.delta(0, 1).status_code == 200
    fragment = info(shared, run, "/rounds/0")["fragments"][0]
    assert fragment["contributors"] == ["a", "b"]
    assert fragment["reason"] == "closed without c after 1 s of grace; 2 of 3 workers have contributed"
    (late,) = events(shared, run, "late")  # of both fragments
    assert late["data"] == {"round": 0, "fragment": 0, "workers": ["c"]}
    assert late["message"].startswith("round 0, first in fragment 0: closed without c after 1 s of grace")


@pytest.mark.covers("security:replayed-upload")
def test_the_same_contribution_again_is_200_and_another_one_is_409(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    assignment = a.assignment(0)
    b.assignment(0)
    assignment = a.assignment(0)
    first, other = a.pseudo_gradients(0)[0], a.pseudo_gradients(1)[0]
    assert a.contribute(assignment, 0, first).status_code == 201
    again = a.contribute(assignment, 0, first)
    assert (again.status_code, again.json()["created"]) == (200, False)
    conflict = problem(a.contribute(assignment, 0, other), "contribution-conflict")
    assert conflict["units"] == assignment.units, "of the one that stands"
    a.contribute(assignment, 1, a.pseudo_gradients(0)[1])
    b.take_part(0)
    assert a.delta(0, 0).status_code == 200
    assert a.contribute(assignment, 0, first).status_code == 200, "even after the round"
    problem(a.contribute(assignment, 0, other), "contribution-conflict")


def test_a_box_whose_gpu_hangs_holds_no_round_although_its_heartbeats_go_on(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    a, b = crew(shared, run, ["a", "b"], members="lease_s = 60\ngrace_min_s = 600\ngrace_max_s = 600")
    play_round([a, b], 0)
    assigned([a, b], 1)
    hung = {"round": 1, "inner_step": 7, "phase": "train", "inner_steps_per_second": 5.0}
    for seconds in (0, 20, 20, 20):
        clock.advance(seconds)
        for member, inner_step in ((a, 10 + seconds), (b, 7)):
            member.http.put(member.path("/lease"), json=hung | {"inner_step": inner_step}).raise_for_status()
    a.take_part(1)
    reason = "waiting for 1 of 2 workers (b); closes in 600 s"
    assert info(shared, run, "/rounds/1")["fragments"][0]["reason"] == reason, "a minute has not passed"
    clock.advance(1)
    shared.coordinator.tick()
    fragment = info(shared, run, "/rounds/1")["fragments"][0]
    assert fragment["contributors"] == ["a"]
    assert "b has taken no inner step for 61 s" in fragment["reason"]
    shared.coordinator.tick()
    (event,) = events(shared, run, "stalled")
    assert event["data"] == {"worker": "b"}
    assert "no inner step for 61 s" in event["message"]


@pytest.mark.usefixtures("one_h")
@pytest.mark.parametrize(("sync", "advised"), [("", True), ('wait = "never"', False)])
def test_whose_work_is_lost_each_time_is_named_with_what_to_do(
    shared: InThread, run: str, clock: SettableClock, sync: str, advised: bool
) -> None:
    """A box half as fast as the other one, with one H for both, would add nothing from then on."""
    members = crew(shared, run, ["a", "b"], rounds=6, sync=sync, members=GRACE_OF_A_SECOND)
    play_round(members, 0)
    for round_ in range(1, 5):
        assigned(members, round_)
        members[0].take_part(round_)
        clock.advance(1)
        shared.coordinator.tick()
        step_all(members, round_)
    said = [event["message"] for event in events(shared, run, "late")]
    assert ["b missed 3 rounds in a row" in each for each in said] == [False, False, advised, False]
    assert ['leave sync.wait = "always" out' in each for each in said] == [False, False, advised, False]
