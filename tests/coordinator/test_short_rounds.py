"""Rounds that all workers hand in early: the schedule follows what was trained, and the run has a round for the rest."""

import pytest

from harness.coordinator import InThread
from harness.member import Member
from protocol.messages import Assignment
from tests.coordinator.crew import crew, enlist, events, info, play_round, play_rounds, ready


def hand_in(member: Member, assignment: Assignment, steps: int) -> None:
    """Contribute the first `steps` inner steps of the assignment, and leave."""
    (start, _), *_ = assignment.units
    units = [[start, start + steps]]
    tokens = steps * member.spec.unit_tokens
    for p, values in enumerate(member.pseudo_gradients(assignment.round)):
        reply = member.contribute(assignment, p, values, units=units, tokens=tokens, inner_steps=steps)
        reply.raise_for_status()
    member.http.delete(member.path()).raise_for_status()


def come_again(running: InThread, run: str, members: list[Member], round_: int) -> list[Member]:
    """The same members with new leases, at the state of `round_`."""
    again = []
    for each in members:
        fresh = enlist(running, run, each.name)
        fresh.theta, fresh.momentum = each.theta, each.momentum
        fresh.step(round_ - 1)
        again.append(fresh)
    return again


def place(assignment: Assignment) -> tuple[int, int, int]:
    return assignment.step, assignment.schedule_steps, assignment.inner_steps


@pytest.mark.slow
def test_a_round_that_all_hand_in_is_as_long_as_its_longest_part(shared: InThread, run: str) -> None:
    """Two rounds of 5 steps: the second is handed in after 2 at most, so there is a third for the other 3."""
    members = crew(shared, run, ["a", "b"], rounds=2, min_workers=2)
    play_round(members, 0)
    for member, steps in zip(members, (1, 2), strict=True):
        assert place(member.assignment(1)) == (5, 5, 5)
        hand_in(member, member.assignment(1), steps)
    shared.await_state(run, 2)
    shown = info(shared, run)
    assert (shown["state"], shown["round"], shown["rounds"], shown["step"]) == ("running", 2, 3, 7)
    assert "after 2 of 5 inner steps" in events(shared, run, "short-round")[0]["message"]

    members = come_again(shared, run, members, 2)
    ready(members, 2)
    assert [place(member.assignment(2)) for member in members] == [(7, 3, 3), (7, 3, 3)]
    play_rounds(shared, members, range(2, 3))
    shown = info(shared, run)
    assert (shown["state"], shown["round"], shown["rounds"], shown["step"]) == ("finished", 3, 3, 10)
    assert shown["reason"] == "the run is finished after 3 of 3 rounds"
    assert info(shared, run, "/checkpoints")["items"][0]["round"] == 3
    assert place(members[0].assignment(3)) == (10, 0, 0)


def test_who_leaves_early_shortens_nobody_else_s_round(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1)
    a.assignment(0)
    b.assignment(0)
    assigned = a.assignment(0), b.assignment(0)
    hand_in(a, assigned[0], 1)
    b.take_part(0)
    shared.await_state(run, 1)
    shown = info(shared, run)
    assert (shown["state"], shown["round"], shown["step"]) == ("finished", 1, 5)
    assert not events(shared, run, "short-round")


def test_with_an_h_of_their_own_every_round_is_a_whole_one(shared: InThread, run: str) -> None:
    """Who was restarted in the middle of a round has a smaller H, and has trained all of it."""
    (member,) = crew(shared, run, ["a"], rounds=2, inner_steps=100, sync='wait = "never"')
    hand_in(member, member.assignment(0), 8)
    shared.await_state(run, 1)
    assert info(shared, run)["step"] == 10


def test_of_a_run_that_streams_every_round_is_a_whole_one(shared: InThread, run: str) -> None:
    """There a whole round's contributions name fewer units than it has: the rest is in the next one's."""
    (member,) = crew(shared, run, ["a"], rounds=2, sync="overlap = 2")
    assignment = member.assignment(0)
    hand_in(member, assignment, 3)
    shared.await_state(run, 1)
    assert info(shared, run)["step"] == 5
