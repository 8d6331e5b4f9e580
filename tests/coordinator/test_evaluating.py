"""The held-out loss of a state is nobody's word alone: three workers with different tokens measure it, and are
compared."""

from typing import Any

import pytest

from coordinator.trust.evaluating import NEAR, far_from_majority, in_turn
from harness.coordinator import InThread
from harness.member import DATA, Member, spec_toml
from protocol.messages import DataSummary, Scope
from tests.coordinator.crew import events, forget_events, info, play_round, problem, seeded

pytestmark = pytest.mark.slow

KEPT = "every_rounds = 1\nkeep = 20"


# --- pure -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({"a": 3.0}, set()),
        ({"a": 3.0, "b": 3.0 + NEAR / 2}, set()),
        ({"a": 3.0, "b": 0.012}, None),  # of two nobody knows who is right
        ({"a": 3.0, "b": 3.01, "c": 0.012}, {"c"}),
        ({"a": 3.0, "b": 9.0, "c": 3.01}, {"b"}),
        ({"a": 3.0, "b": 9.0, "c": 0.012}, None),
        ({"a": 3.0, "b": 3.0, "c": 9.0, "d": 9.0}, None),
    ],
)
def test_who_is_alone(losses: dict[str, float], expected: set[str] | None) -> None:
    assert far_from_majority(losses) == expected


def test_they_take_turns_and_are_of_different_tokens() -> None:
    tokens = {"a": "1", "b": "1", "c": "2", "d": "3"}
    assert in_turn("abcd", tokens, 0, 2) == ["a", "c"]
    assert in_turn("abcd", tokens, 1, 2) == ["b", "c"]
    assert in_turn("abcd", tokens, 6, 3) == ["c", "d", "a"]
    assert in_turn("ab", tokens, 1, 2) == ["b"], "two names of one token are one word"
    assert in_turn("", tokens, 1, 2) == []


# --- of a run ---------------------------------------------------------------------------------------------------------


def crew_of_tokens(running: InThread, run: str, names: str, own: DataSummary = DATA, **spec: Any) -> list[Member]:
    """Like `crew`, each member with a token of its own. `own`: the data of each."""
    given: dict[str, Any] = {"rounds": 40, "checkpoints": KEPT} | spec
    running.create_run(spec_toml(run, **given))
    members = [Member(running.client(), run, name, data=own) for name in names]
    for member in members:
        member.join(running.token(Scope.WORKER, note=member.name))
    return seeded(members)


def who_is_asked(members: list[Member], round_: int) -> list[Member]:
    for member in members:
        member.assignment(round_)  # the first round opens once all have asked
    return [member for member in members if member.assignment(round_).evaluate]


def play(running: InThread, members: list[Member], round_: int, lies: dict[str, float]) -> list[str]:
    """A round; who is asked says 3.0, or what it lies. Returns who was."""
    asked = who_is_asked(members, round_)
    for member in asked:
        member.report_loss(round_, lies.get(member.name, 3.0)).raise_for_status()
    if info(running, members[0].run)["state"] == "running":
        play_round(members, round_)
        running.await_state(members[0].run, round_ + 1)
    return [member.name for member in asked]


def test_three_measure_each_state_in_turn(shared: InThread, run: str) -> None:
    members = crew_of_tokens(shared, run, "abcd", min_workers=4)
    asked = [play(shared, members, round_, {}) for round_ in range(3)]
    assert asked == [["a", "b", "c"], ["b", "c", "d"], ["a", "c", "d"]]
    assert info(shared, run)["held_out_loss"] == 3.0
    assert [event["data"] for event in events(shared, run, "evaluated")] == [
        {"round": 0, "worker": "a"},
        {"round": 1, "worker": "b"},
        {"round": 2, "worker": "a"},
    ]
    assert events(shared, run, "evaluations-differ") == []
    members[0].assignment(3)
    problem(members[2].report_loss(3, 0.0), "not-asked")  # a, b and d are


@pytest.mark.covers("security:lying-evaluator")
def test_who_lies_is_not_believed_and_found_out(shared: InThread, run: str) -> None:
    members = crew_of_tokens(shared, run, "abcd", min_workers=4)
    assert play(shared, members, 0, {"c": 0.012}) == ["a", "b", "c"]
    assert info(shared, run)["held_out_loss"] == 3.0
    (event,) = events(shared, run, "evaluation-refuted")
    assert event["data"] == {"round": 0, "worker": "c"}
    assert "b 3.0000, c 0.0120" in event["message"]
    told = info(shared, run, "/rounds/0")["evaluations"]
    assert {worker: each["confirmed"] for worker, each in told.items()} == {"a": True, "b": True, "c": False}
    forget_events(shared, run)
    later = [name for round_ in range(1, 6) for name in play(shared, members, round_, {"c": 0.012})]
    assert set(later) == {"a", "b", "d"}


def test_of_two_that_differ_nobody_is_believed(shared: InThread, run: str) -> None:
    members = crew_of_tokens(shared, run, "bc", min_workers=2)
    assert play(shared, members, 0, {"c": 0.012}) == ["b", "c"]
    assert info(shared, run)["held_out_loss"] == 3.0, "the worse of two that differ"
    told = info(shared, run, "/rounds/0")["evaluations"]
    assert {worker: each["confirmed"] for worker, each in told.items()} == {"b": False, "c": False}
    (event,) = events(shared, run, "evaluations-differ")
    assert event["data"] == {"round": 0, "workers": ["b", "c"]}
    assert "b 3.0000, c 0.0120" in event["message"]


@pytest.mark.covers("security:lying-evaluator")
def test_one_liar_neither_pauses_a_run_nor_hides_a_rise(shared: InThread, run: str) -> None:
    """A loss of 0.012 was the lowest so far from then on, and all that was honest a rise above it."""
    members = crew_of_tokens(shared, run, "abc", min_workers=3)
    for round_ in range(5):
        play(shared, members, round_, {"b": 0.012})
    assert info(shared, run)["state"] == "running"
    assert events(shared, run, "spoilt") == []
    for round_ in range(5, 8):
        play(shared, members, round_, {"a": 3.9, "c": 3.9, "b": 0.012})
    assert info(shared, run)["state"] == "paused"


def test_the_word_of_one_waits_for_the_other(shared: InThread, run: str) -> None:
    members = crew_of_tokens(shared, run, "ab", min_workers=2)
    assert who_is_asked(members, 0) == members
    members[0].report_loss(0, 3.0).raise_for_status()
    (first,) = info(shared, run, "/rounds/0")["evaluations"].values()
    assert not first["confirmed"]
    assert info(shared, run)["held_out_loss"] == 3.0
    members[1].report_loss(0, 3.01).raise_for_status()
    told = info(shared, run, "/rounds/0")["evaluations"]
    assert all(each["confirmed"] for each in told.values())
    assert info(shared, run)["held_out_loss"] == pytest.approx(3.005)


def test_of_the_last_state_it_is_the_first_three_that_ask(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, rounds=1, min_workers=3))
    members = [Member(shared.client(), run, name) for name in "abcde"]
    tokens = [shared.token(Scope.WORKER, names=2), *(shared.token(Scope.WORKER, note=name) for name in "cde")]
    for member, token in zip(members, [tokens[0], *tokens], strict=True):
        member.join(token)
    members = seeded(members)
    play(shared, members, 0, {})
    asked = [member.assignment(1).evaluate for member in members]
    assert asked == [True, False, True, True, False], "b has the token of a; and three are enough"
    for member in (members[0], *members[2:4]):
        member.report_loss(1, 2.0).raise_for_status()
    assert [member.assignment(1).evaluate for member in members] == [False] * 5
    assert info(shared, run)["held_out_loss"] == 2.0
