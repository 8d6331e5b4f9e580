"""Quarantine: whose contributions are left out again and again takes no part for a while, and has a way back."""

import pytest

from coordinator.trust.quarantine import BACK, MOST_ROUNDS, QUARANTINED, Reputation
from harness.coordinator import InThread, SettableClock
from harness.member import Member, spec_toml
from protocol.messages import Scope
from tests.coordinator.crew import crew, enlist, events, info, play_rounds, problem, recovered, set_state

pytestmark = pytest.mark.slow

GRACE = "grace_min_s = 10\ngrace_max_s = 10"
LONG = 1000.0  # times what is usual: left out


# --- pure -------------------------------------------------------------------------------------------------------------


def played(counted: list[float], reputation: Reputation | None = None) -> Reputation:
    reputation = reputation or Reputation()
    for round_, each in enumerate(counted):
        reputation = reputation.after(round_, each)
    return reputation


def test_five_rounds_in_a_row_for_nothing_are_enough_and_three_the_next_time() -> None:
    assert played([0.0] * 4).until == 0
    assert played([0.0] * 5) == Reputation(BACK, times=1, until=15)
    again = Reputation(BACK, times=1, until=15)
    assert again.after(15, 0.0).after(16, 0.0).until == 15
    assert again.after(15, 0.0).after(16, 0.0).after(17, 0.0) == Reputation(BACK, times=2, until=38)


def test_what_counts_in_part_and_lapses_now_and_then_are_no_reason() -> None:
    assert played([0.5] * 100).until == 0
    assert played([0.0, 1.0, 1.0] * 50).until == 0
    assert played([1.0] * 5).score == 1.0


def test_the_longest_quarantine_has_a_bound() -> None:
    reputation = Reputation()
    for _ in range(40):
        before = reputation
        while reputation.until == before.until:
            reputation = reputation.after(before.until, 0.0)
        assert reputation.until - before.until <= MOST_ROUNDS + 1
    assert reputation.score > QUARANTINED


# --- of a run ---------------------------------------------------------------------------------------------------------


def play(running: InThread, members: list[Member], hostile: Member, round_: int) -> None:
    """A round of all, in which one sends what is left out; or of all the others, where it is told to wait."""
    waits = [member for member in [*members, hostile] if member.assignment(round_).action == "wait"]
    taking_part = members if hostile.assignment(round_).action == "wait" else [*members, hostile]
    assert round_ == 0 or all(member is hostile for member in waits)
    for member in taking_part:
        assignment = member.assignment(round_)
        scale = LONG if member is hostile else 1.0
        for fragment, values in enumerate(member.pseudo_gradients(round_)):
            member.contribute(assignment, fragment, values * scale).raise_for_status()
    for member in [*members, hostile]:
        member.step(round_)
    running.await_state(members[0].run, round_ + 1)


@pytest.mark.covers("security:repeat-offender")
def test_it_takes_no_part_until_its_time_is_over(shared: InThread, run: str) -> None:
    *members, hostile = crew(shared, run, ["a", "b", "c", "m"], rounds=30, min_workers=3)
    for round_ in range(5):
        play(shared, members, hostile, round_)
    (event,) = events(shared, run, "quarantined")
    assert event["data"] == {"worker": "m", "until": 15}
    shown = info(shared, run, "/workers/m")
    assert (shown["quarantined_until"], shown["score"]) == (15, BACK)
    told = hostile.assignment(5)
    assert (told.action, told.reason) == ("wait", "m is in quarantine: its contributions were left out too often")
    for round_ in range(5, 15):
        play(shared, members, hostile, round_)
        contributors = info(shared, run, f"/rounds/{round_}")["fragments"][0]["contributors"]
        assert sorted(contributors) == ["a", "b", "c"]
    play_rounds(shared, [*members, hostile], range(15, 16))
    assert "m" in info(shared, run, "/rounds/15")["fragments"][0]["contributors"]
    assert info(shared, run, "/workers/m")["quarantined_until"] is None
    assert info(shared, run, "/workers/m")["score"] > BACK


def test_a_run_with_too_few_others_goes_on_with_it(shared: InThread, run: str) -> None:
    *members, hostile = crew(shared, run, ["a", "b", "m"], rounds=30, min_workers=3)
    for round_ in range(8):
        play(shared, members, hostile, round_)
    assert events(shared, run, "quarantined")
    assert info(shared, run)["round"] == 8


@pytest.mark.covers("security:refused-and-beating")
def test_a_round_that_needs_everybody_waits_no_longer_than_the_grace_for_who_is_refused(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    """It beats, and each contribution that it sends is refused: it held the round for ever."""
    *members, hostile = crew(
        shared, run, ["a", "b", "m"], rounds=30, min_workers=3, members=f"lease_s = 86400\n{GRACE}"
    )
    play_rounds(shared, [*members, hostile], range(1))
    assignment = hostile.assignment(1)
    for fragment in range(2):
        problem(hostile.put(hostile.contribution_path(1, fragment), b"nothing of the kind"), "invalid-payload")
    for member in members:
        member.take_part(1, wait_s=0)
    assert info(shared, run)["round"] == 1
    clock.advance(10)
    shared.await_state(run, 2)
    reason = info(shared, run, "/rounds/1")["fragments"][0]["reason"]
    assert "closed without m after 10 s of grace; 2 of 3 workers have contributed" in reason
    problem(hostile.contribute(assignment, 0, hostile.pseudo_gradients(1)[0]), "round-closed")


def test_a_round_that_needs_everybody_waits_for_who_may_still_contribute(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    *members, slow = crew(shared, run, ["a", "b", "m"], rounds=30, min_workers=3, members=f"lease_s = 86400\n{GRACE}")
    play_rounds(shared, [*members, slow], range(1))
    slow.assignment(1)
    for member in members:
        member.take_part(1, wait_s=0)
    clock.advance(1000)
    shared.coordinator.tick()
    assert "no deadline before a quorum" in info(shared, run)["reason"]
    slow.take_part(1)
    shared.await_state(run, 2)


def test_the_operator_ends_it(shared: InThread, run: str) -> None:
    *members, hostile = crew(shared, run, ["a", "b", "m"], rounds=30, min_workers=2)
    for round_ in range(5):
        play(shared, members, hostile, round_)
    assert hostile.assignment(5).action == "wait"
    set_state(shared, f"{run}/workers/m", "readmitted")
    (event,) = events(shared, run, "readmitted")
    assert event["message"] == "m takes part again"
    assert hostile.assignment(5).action == "train"


@pytest.mark.covers("security:repeat-offender")
def test_another_name_of_the_same_token_is_no_way_out(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, rounds=30, min_workers=2))
    names = [Member(shared.client(), run, name) for name in "abm"]
    tokens = [shared.token(Scope.WORKER, note=member.name, names=2) for member in names]
    for member, token in zip(names, tokens, strict=True):
        member.join(token)
    names[0].assignment(None)
    names[0].seed()
    *members, hostile = [recovered(member) for member in names]
    for round_ in range(4):
        play(shared, members, hostile, round_)
    second = Member(shared.client(), run, "n")
    second.join(tokens[2])
    assert info(shared, run, "/workers/n")["score"] == info(shared, run, "/workers/m")["score"] < 0.5
    other = Member(shared.client(), run, "o")
    other.join(tokens[0])
    assert info(shared, run, "/workers/o")["score"] == 1.0


# --- a run that would stand still without it --------------------------------------------------------------------------


@pytest.mark.covers("security:idle-replacement")
def test_whoever_does_not_contribute_replaces_nobody(shared: InThread, run: str, clock: SettableClock) -> None:
    *members, a = crew(shared, run, ["b", "c", "d", "a"], rounds=30, members="lease_s = 86400\nround_max_s = 600")
    for round_ in range(5):
        play(shared, members, a, round_)
    b, *others = members
    for member in others:
        member.http.delete(member.path()).raise_for_status()

    def goes_on_with_a_alone(round_: int) -> None:
        a.take_part(round_, wait_s=0)
        a.step(round_)
        shared.await_state(run, round_ + 1)

    # It has contributed, and asks for its assignment; then it only beats.
    assert b.assignment(5).action == "train"
    clock.advance(599)
    assert a.assignment(5).action == "wait"
    clock.advance(1)
    goes_on_with_a_alone(5)
    b.http.delete(b.path()).raise_for_status()

    # It has never asked for anything.
    beating = enlist(shared, run, "z")
    for round_ in (6, 7):
        beating.http.put(beating.path("/lease"), json={}).raise_for_status()
        goes_on_with_a_alone(round_)

    # It asks, and has never contributed.
    assert beating.assignment(8).action == "train"
    assert a.assignment(8).action == "train"
