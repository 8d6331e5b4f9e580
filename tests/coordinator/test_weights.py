"""What a contribution may weigh in the mean: one round's work, whatever it carries."""

import httpx

from benchmarks.harness.coordinator import InThread, SettableClock
from benchmarks.harness.member import Member
from protocol.messages import Assignment
from tests.coordinator.crew import GRACE_OF_A_SECOND, crew, problem

UNITS = 5  # of a round


def late_member(
    shared: InThread, run: str, clock: SettableClock, rounds: int, sync: str = ""
) -> tuple[Member, list[list[int]]]:
    """One of three members, which was late for each of the first rounds with all of its work; and the units of that."""
    spec = {"rounds": rounds + 2, "min_workers": 2, "members": GRACE_OF_A_SECOND, "sync": sync}
    members = a, b, c = crew(shared, run, ["a", "b", "c"], **spec)
    late: list[list[int]] = []
    for round_ in range(rounds):
        for member in (a, b):
            member.assignment(round_)
        late += ask(c, round_, late).units
        for member in (a, b):
            member.take_part(round_)
        clock.advance(2)
        shared.coordinator.tick()
        for member in members:
            member.step(round_)
    return c, late


def ask(member: Member, round_: int, late: list[list[int]]) -> Assignment:
    """The assignment of a member that still has its work on the units `late`."""
    body = {"state_round": round_, "carried": late}
    reply = member.http.put(member.path("/assignment"), json=body, headers={"Prefer": "wait=20"})
    return Assignment.model_validate(reply.raise_for_status().json())


def send(member: Member, assignment: Assignment, weight: int, **changes: object) -> httpx.Response:
    """A contribution to fragment 0 of so many units' weight."""
    values = member.pseudo_gradients(assignment.round)[0]
    return member.contribute(assignment, 0, values, tokens=weight * member.spec.unit_tokens, **changes)


def test_carried_work_does_not_count(shared: InThread, run: str, clock: SettableClock) -> None:
    """Two rounds of work were once taken with the weight of two: the mean was the straggler's."""
    c, late = late_member(shared, run, clock, 2)
    assignment = ask(c, 2, late)
    named = {"units": late + assignment.units, "carried": [0, 1]}
    for weight in (1, UNITS - 1, UNITS + 1, 2 * UNITS, 3 * UNITS):
        detail = problem(send(c, assignment, weight, **named), "invalid-payload")["detail"]
        assert f"{weight} units; the contribution names 15, 5 of them of its own round" in detail
    assert send(c, assignment, UNITS, **named).status_code == 201


def test_the_first_units_of_a_round_weigh_as_many(shared: InThread, run: str, clock: SettableClock) -> None:
    c, late = late_member(shared, run, clock, 1)
    assignment = ask(c, 1, late)
    (start, _), *_ = assignment.units
    named = {"units": [*late, [start, start + 2]], "carried": [0]}
    problem(send(c, assignment, UNITS, **named), "invalid-payload")
    assert send(c, assignment, 2, **named).status_code == 201


def test_work_that_is_all_carried_weighs_at_most_the_last_of_its_rounds(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    c, late = late_member(shared, run, clock, 2)
    assignment = ask(c, 2, late)
    named = {"units": late, "carried": [0, 1]}
    problem(send(c, assignment, 2 * UNITS, **named), "invalid-payload")
    problem(send(c, assignment, UNITS + 1, **named), "invalid-payload")
    assert send(c, assignment, UNITS, **named).status_code == 201


def test_a_fragment_sent_in_the_middle_of_a_round_weighs_what_two_rounds_have_of_it(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    """Late twice in a row: three rounds of units are named, of which no fragment was trained on more than two since it
    was sent last."""
    c, late = late_member(shared, run, clock, 2, sync="overlap = 2")
    assignment = ask(c, 2, late)
    named = {"units": late + assignment.units, "carried": [0, 1]}
    problem(send(c, assignment, 3 * UNITS, **named), "invalid-payload")
    problem(send(c, assignment, 2 * UNITS + 1, **named), "invalid-payload")
    assert send(c, assignment, 2 * UNITS, **named).status_code == 201


def test_a_fragment_sent_at_the_beginning_of_a_round_weighs_a_round_though_it_names_one_unit(
    shared: InThread, run: str
) -> None:
    (a,) = crew(shared, run, ["a"], sync="overlap = 2")
    assignment = a.assignment(0)
    problem(send(a, assignment, UNITS + 1, units=[[0, 1]]), "invalid-payload")
    assert send(a, assignment, UNITS, units=[[0, 1]]).status_code == 201


def test_units_that_are_not_held_are_told_as_such_whatever_the_weight(shared: InThread, run: str) -> None:
    """A worker whose lease had ended asks for its units again; of a payload that breaks the rules it would despair."""
    (a,) = crew(shared, run, ["a"])
    problem(send(a, a.assignment(0), UNITS, units=[[500, 505]]), "units-not-held")
    problem(send(a, a.assignment(0), UNITS, units=[[3, 8]]), "units-not-held")
