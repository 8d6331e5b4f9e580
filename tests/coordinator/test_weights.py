"""What a contribution may weigh in the mean: one round's work, whatever it carries."""

from statistics import median
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.live_run import LiveRun
from coordinator.store.tables import AssignmentRow, ContributionRow
from coordinator.sync.admission import WEIGHED_ROUNDS, _unused_weight
from coordinator.sync.deltas import rebuild_delta_if_damaged
from coordinator.trust.verdicts import weights
from harness.coordinator import InThread, SettableClock
from harness.member import Member
from protocol.digest import digest
from protocol.messages import Assignment
from protocol.spec.sections import SyncSpec
from protocol.wire import ContributionHeader, DeltaHeader, Payload
from tests.coordinator.crew import GRACE_OF_A_SECOND, crew, info, problem, ready

UNITS = 5  # of a round


def late_member(
    shared: InThread, run: str, clock: SettableClock, rounds: int, sync: str = ""
) -> tuple[Member, list[list[int]]]:
    """One of three members, which was late for each of the first rounds with all of its work; and the units of that."""
    (*_, c), late = late_crew(shared, run, clock, rounds, sync)
    return c, late


def late_crew(
    shared: InThread, run: str, clock: SettableClock, rounds: int, sync: str = ""
) -> tuple[list[Member], list[list[int]]]:
    """Three members, of which the last one was late for each of the first rounds; and the units of its work."""
    spec = {"rounds": rounds + 2, "min_workers": 2, "members": GRACE_OF_A_SECOND, "sync": sync}
    members = a, b, c = crew(shared, run, ["a", "b", "c"], **spec)
    late: list[list[int]] = []
    for round_ in range(rounds):
        ready([a, b], round_)
        late += ask(c, round_, late).units
        for member in (a, b):
            member.take_part(round_)
        clock.advance(2)
        shared.coordinator.tick()
        for member in members:
            member.step(round_)
    return members, late


def ask(member: Member, round_: int, late: list[list[int]]) -> Assignment:
    """The assignment of a member that still has its work on the units `late`."""
    body = {"state_round": round_, "carried": late}
    reply = member.http.put(member.path("/assignment"), json=body, headers={"Prefer": "wait=20"})
    return Assignment.model_validate(reply.raise_for_status().json())


def send(member: Member, assignment: Assignment, weight: int, **changes: object) -> httpx.Response:
    """A contribution to fragment 0 of so many units' weight."""
    values = member.pseudo_gradients(assignment.round)[0]
    return member.contribute(assignment, 0, values, tokens=weight * member.spec.unit_tokens, **changes)


# Rounds that the worker was late for, lines of [sync], units of its own round that it names; units' weights that are
# refused, and the one that is accepted.
WEIGHTS = [
    # Two rounds of work were once taken with the weight of two: the mean was the straggler's.
    pytest.param(
        2, "", UNITS, (1, UNITS - 1, UNITS + 1, 2 * UNITS, 3 * UNITS), UNITS, id="carried work", marks=pytest.mark.slow
    ),
    pytest.param(1, "", 2, (UNITS,), 2, id="the first units of a round"),
    pytest.param(2, "", 0, (2 * UNITS, UNITS + 1), UNITS, id="all carried: at most the last of its rounds"),
    # Three rounds of units are named, of which no fragment was trained on more than two since it was sent last.
    pytest.param(2, "overlap = 2", UNITS, (3 * UNITS, 2 * UNITS + 1), 2 * UNITS, id="in the middle of a round"),
    pytest.param(0, "overlap = 2", 1, (UNITS + 1,), UNITS, id="at the beginning of a round"),
]


@pytest.mark.slow
@pytest.mark.covers("security:untrained-units")
@pytest.mark.parametrize(("rounds", "sync", "own", "refused", "weight"), WEIGHTS)
def test_a_contribution_weighs_the_work_of_its_own_round_whatever_it_carries(
    shared: InThread, run: str, clock: SettableClock, rounds: int, sync: str, own: int, refused: tuple, weight: int
) -> None:
    (*others, c), late = late_crew(shared, run, clock, rounds, sync)
    ready(others, rounds)
    assignment = ask(c, rounds, late)
    (start, _), *_ = assignment.units
    units = [*late, [start, start + own]] if own else late
    named = {"units": units, "carried": list(range(rounds))}
    for each in refused:
        detail = problem(send(c, assignment, each, **named), "invalid-payload")["detail"]
        assert f"{each} units; the contribution names {rounds * UNITS + own}, {own} of them of its own round" in detail
    assert send(c, assignment, weight, **named).status_code == 201


@pytest.mark.parametrize(("long", "allowed"), [(0, True), (2, False)])
def test_work_of_a_long_round_may_be_in_the_first_of_those_that_are_compared(
    long: int, allowed: bool, shared: InThread, run: str
) -> None:
    """A worker that had become slow was refused for good, eight rounds later. But a contribution after the long round
    has used up that round's work: then it allows nothing any more."""
    now = WEIGHED_ROUNDS + long
    (a,) = crew(shared, run, ["a"], rounds=20, sync="overlap = 2")
    live, tokens = shared.live(run), a.spec.unit_tokens
    with shared.coordinator.database.write() as session:
        for round_ in range(now + 1):
            steps = 4 if round_ == 0 else 1
            session.merge(AssignmentRow(run_id=live.id, round=round_, worker="a", inner_steps=steps, evaluate=False))
            if 0 < round_ < now:
                weight = 3 if round_ == now - WEIGHED_ROUNDS + 1 else 1
                contribution = {"digest": b"", "size": 1, "inner_steps": 1, "norm": 1.0, "accepted_at": 0.0}
                address = {"run_id": live.id, "round": round_, "fragment": 0, "worker": "a"}
                session.add(ContributionRow(**address, tokens=weight * tokens, **contribution))
    assert allows_a_unit(live, now) is allowed


def allows_a_unit(live: LiveRun, round_: int) -> bool:
    header = SimpleNamespace(worker="a", round=round_, fragment=0)
    return _unused_weight(live, cast(ContributionHeader, header))[0] > 0


def test_units_that_are_not_held_are_told_as_such_whatever_the_weight(shared: InThread, run: str) -> None:
    """A worker whose lease had ended asks for its units again; of a payload that breaks the rules it would despair."""
    (a,) = crew(shared, run, ["a"])
    problem(send(a, a.assignment(0), UNITS, units=[[500, 505]]), "units-not-held")
    problem(send(a, a.assignment(0), UNITS, units=[[3, 8]]), "units-not-held")


# --- nobody outweighs -------------------------------------------------------------------------------------------------

AUTO = SyncSpec(rounds=1)


@pytest.mark.covers("security:false-pace")
def test_ten_thousand_units_weigh_four_times_what_the_others_do() -> None:
    """They were once 99.8 % of the mean."""
    assert weights({"a": 20, "b": 20, "c": 10_000}, AUTO) == {"a": 20, "b": 20, "c": 80}
    assert weights({"a": 20, "b": 60, "c": 10_000}, AUTO) == {"a": 20, "b": 60, "c": 160}


def test_who_has_little_takes_nothing_from_the_others() -> None:
    """A worker that was restarted late in the round hands in a few steps."""
    tokens = {"a": 500, "b": 480, "late": 10}
    assert weights(tokens, AUTO) == tokens


def test_of_two_nobody_can_tell_which_one_is_usual_and_one_h_for_all_needs_no_bound() -> None:
    assert weights({"a": 20, "b": 10_000}, AUTO) == {"a": 20, "b": 10_000}
    fixed = SyncSpec(rounds=1, wait="always")
    assert weights({"a": 1, "b": 2, "c": 500}, fixed) == {"a": 1, "b": 2, "c": 500}, "two were told to leave"


@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=12))
def test_a_weight_ends_at_four_times_the_median_of_the_others(units: list[int]) -> None:
    tokens = {f"w{place}": 32 * each for place, each in enumerate(units)}
    bounded = weights(tokens, AUTO)
    for worker, own in tokens.items():
        most = 4 * median(each for other, each in tokens.items() if other != worker)
        assert bounded[worker] == min(own, most)
        assert bounded[worker] % 32 == 0
        assert bounded[worker] > 0
    assert weights(bounded, AUTO).keys() == tokens.keys()


@pytest.mark.slow
def test_the_delta_says_what_each_weighed_and_is_made_again_to_the_same_bytes(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b", "fast"], rounds=9, inner_steps=100, min_workers=3, sync='wait = "never"')
    for round_ in range(2):
        for member, pace in zip(members, (0.5, 0.5, 8.0), strict=True):
            member.http.put(member.path("/lease"), json={"inner_steps_per_second": pace}).raise_for_status()
            member.assignment(round_)
        for member in members:
            member.take_part(round_)
        for member in members:
            member.step(round_)
    live, delta = shared.live(run), members[0].delta(1, 0).content
    header = Payload.from_bytes(delta).header
    assert isinstance(header, DeltaHeader)
    unit = members[0].spec.unit_tokens
    assert {each.worker: each.tokens // unit for each in header.contributors} == {"a": 6, "b": 6, "fast": 24}
    assert info(shared, run, "/workers/fast")["tokens"] == (10 + 100) * unit, "what it has trained is counted whole"
    live.blobs.delete(live.names.delta(1, 0, digest(delta)))
    assert rebuild_delta_if_damaged(live, 1, 0)
    assert members[0].delta(1, 0).content == delta
