"""What a worker may carry, and what it may weigh, is what the coordinator's record says and not what it claims."""

import httpx
import pytest

from harness.coordinator import InThread, SettableClock
from harness.member import Member
from protocol.messages import Action
from tests.coordinator.crew import crew, enlist, play_round, problem, recovered
from tests.coordinator.test_weights import UNITS, ask, late_member, send


@pytest.mark.slow
@pytest.mark.covers("security:false-carried-rounds")
def test_a_round_that_it_has_contributed_to_cannot_be_carried(shared: InThread, run: str) -> None:
    """Two rounds named as carried once doubled the norm that was allowed, and bent the test of directions."""
    members = crew(shared, run, ["a", "b"], rounds=4, min_workers=2)
    for round_ in range(2):
        play_round(members, round_)
    a, _ = members
    assignment = a.assignment(2)
    for carried in ([0, 1], [1], [0]):
        detail = problem(send(a, assignment, UNITS, carried=carried), "units-not-held")["detail"]
        assert f"carried is {carried}" in detail
        assert "has contributed to round 1" in detail or carried == [0]
    assert send(a, assignment, UNITS).status_code == 201


@pytest.mark.covers("security:false-carried-rounds")
def test_a_round_without_an_assignment_cannot_be_carried(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b"], rounds=4, min_workers=2)
    play_round(members, 0)
    late = recovered(enlist(shared, run, "c"))
    late.theta, late.momentum = members[0].theta, members[0].momentum
    detail = problem(send(late, late.assignment(1), UNITS, carried=[0]), "units-not-held")["detail"]
    assert "round 0, in which c had no assignment" in detail


def test_only_rounds_since_the_last_contribution_can_be_carried(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    c, late = late_member(shared, run, clock, 1)
    assignment = ask(c, 1, late)
    named = {"units": late + assignment.units, "carried": [0]}
    assert send(c, assignment, UNITS, **named).status_code == 201
    assert send(c, assignment, UNITS, **named).status_code == 200, "the same again"


@pytest.mark.covers("security:untrained-units")
def test_more_units_than_it_was_assigned_cannot_be_carried(shared: InThread, run: str, clock: SettableClock) -> None:
    """What is back in the pool was given to whoever said to carry it."""
    c, late = late_member(shared, run, clock, 1)
    (start, stop), *_ = late
    detail = problem(claim(c, 1, [[start, stop + 1000]]), "units-not-held")["detail"]
    assert "carries 1005 work units, but was assigned only 5 since" in detail
    assert ask(c, 1, late).action is Action.TRAIN


def claim(member: Member, round_: int, units: list[list[int]]) -> httpx.Response:
    return member.http.put(member.path("/assignment"), json={"state_round": round_, "carried": units})


@pytest.mark.slow
@pytest.mark.covers("security:untrained-units")
def test_over_some_rounds_a_fragment_weighs_what_its_worker_was_assigned(shared: InThread, run: str) -> None:
    """With overlap a contribution may name few of its units and weigh a round all the same, and the next one the rest
    beside its own: in turn that was half as much again as was assigned, for ever."""
    (a,) = crew(shared, run, ["a"], rounds=20, sync="overlap = 2")
    weighed, kept, refused = 0, list[list[int]](), 0
    for round_ in range(4):
        assignment = ask(a, round_, kept)
        (start, stop), *_ = assignment.units
        if round_ % 2:
            units, weight, kept = [*kept, *assignment.units], 2 * UNITS - 1, []
        else:
            units, weight, kept = [[start, start + 1]], UNITS, [[start + 1, stop]]
        allowed = UNITS * (round_ + 2) - weighed
        if weight > allowed:
            reply = send(a, assignment, weight, units=units)
            assert f"its weight is 1 to {allowed}" in problem(reply, "invalid-payload")["detail"]
            weight, refused = allowed, refused + 1
        assert send(a, assignment, weight, units=units).status_code == 201
        weighed += weight
        for fragment, values in list(enumerate(a.pseudo_gradients(round_)))[1:]:
            a.contribute(assignment, fragment, values, units=units, tokens=a.spec.unit_tokens)
        a.step(round_)
    assert refused == 1
