"""The guard: when a model looks spoilt, who stands out, and what follows in each case."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.state_file import BOUND
from coordinator.trust.guard import (
    SUSPECTED,
    CountedContribution,
    Rise,
    most_different,
    risen,
    stopped_falling,
    suspects,
)
from coordinator.upkeep import rolling_back
from harness.coordinator import InThread
from harness.member import F32, Member, spec_toml
from tests.coordinator.crew import (
    assigned,
    crew,
    enlist,
    events,
    forget_events,
    info,
    play_round,
    play_rounds,
    problem,
    set_state,
    step_all,
)
from tests.coordinator.test_restart import Lives
from tests.coordinator.test_rolling_back import joined_again
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KEPT = "every_rounds = 1\nkeep = 20"


# --- pure -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0, 4.0, 3.0], None),
        ([5.0, 4.0, 4.6], None),  # one alone may be a mistake
        ([5.0, 4.0, 4.6, 4.1], None),
        ([5.0, 4.0, 4.5, 4.5], None),  # just as much as is allowed
        ([4.0, 4.6, 4.7], Rise(2, 4.7, good=0, lowest=4.0)),
        ([5.0, 4.0, 4.2, 4.4, 4.6, 4.8], Rise(5, 4.8, good=3, lowest=4.0)),  # a trend
        ([4.0, math.nan, math.nan], Rise(2, math.nan, good=0, lowest=4.0)),
        ([4.0, math.inf, math.inf], Rise(2, math.inf, good=0, lowest=4.0)),
        ([9.0, 9.0], None),
    ],
)
def test_two_losses_in_a_row_above_the_lowest_are_a_rise(losses: list[float], expected: Rise | None):
    assert repr(risen(list(enumerate(losses)), 0.5)) == repr(expected)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0, 3.1, 3.0, 3.2], None),  # too few to tell
        ([4.0, 3.0, 3.1, 3.0, 3.2, 3.1], (1, 3.0)),
        ([4.0, 3.0, 3.1, 3.0, 3.2, 2.9], None),
        ([4.0, 3.0, 3.1, 2.9, 3.2, 3.1], None),  # the lowest is one of the newest
        ([4.0, 3.0, math.nan, 3.0, math.inf, 3.1], (1, 3.0)),
    ],
)
def test_without_a_new_lowest_loss_it_has_stopped_falling(losses: list[float], expected: tuple[int, float] | None):
    assert stopped_falling(list(enumerate(losses))) == expected


def parts(*cosines: float | None, factor: float = 1.0) -> list[CountedContribution]:
    return [CountedContribution(factor, cosine) for cosine in cosines]


def test_who_was_shortened_most_of_the_time_stands_out():
    honest = {name: parts(0.5, 0.5, 0.5) for name in "abc"}
    assert suspects(honest) == []
    assert suspects(
        {**honest, "d": [CountedContribution(0.4, 0.5), CountedContribution(0.4, 0.5), CountedContribution(1.0, 0.5)]}
    ) == ["d"]
    assert suspects({**honest, "d": [CountedContribution(0.4, 0.5), CountedContribution(1.0, 0.5)]}) == [], (
        "half of the time is not most of it"
    )
    assert suspects({**honest, "d": [CountedContribution(0.0, None)]}) == [], "of one contribution nobody can tell"


def test_whose_direction_was_hardly_that_of_the_others_stands_out():
    honest = {name: parts(0.5, 0.4, 0.6) for name in "abc"}
    assert suspects({**honest, "d": parts(0.1, 0.1, 0.1)}) == ["d"]
    assert suspects({**honest, "d": parts(0.2, 0.2, 0.2)}) == []
    assert suspects({**honest, "d": parts(0.2, 0.2, 0.2)}, SUSPECTED) == ["d"]
    assert suspects({"a": parts(0.5, 0.5), "d": parts(-0.5, -0.5)}) == [], "of two nobody can tell"


def test_some_worker_always_differs_most():
    assert most_different({"a": parts(0.5, 0.5), "d": parts(-0.5, -0.5)}) is None, "of two nobody can tell"
    assert most_different({"a": parts(0.5), "b": parts(None), "c": parts(None)}) is None
    honest = {name: parts(0.5, 0.4, 0.6) for name in "abc"}
    found = most_different({**honest, "d": parts(0.45, 0.45, 0.45)})
    assert found == ("d", "its mean cosine is 0.450, the others' 0.500; its mean factor is 1.00")
    assert (most_different({**honest, "d": parts(0.5, 0.5, factor=0.4)}) or "")[0] == "d"
    assert (most_different({**honest, "d": parts(None, None, factor=0.0)}) or "")[0] == "d"


def test_half_of_the_workers_do_not_stand_out():
    short, honest = parts(0.5, 0.5, factor=0.4), parts(0.5, 0.5)
    assert suspects({"a": short, "b": honest, "c": honest}) == ["a"]
    assert suspects({"a": short, "b": short, "c": honest, "d": honest}) == []


# --- of a run ---------------------------------------------------------------------------------------------------------


def evaluate(members: list[Member], state: int, loss: float) -> str:
    """Whoever is asked to tells the held-out loss; returns who."""
    (asked,) = [member for member in members if member.assignment(state).evaluate]
    asked.report_loss(state, loss).raise_for_status()
    return asked.name


def play(
    running: InThread,
    members: list[Member],
    run: str,
    losses: list[float],
    first: int = 0,
    work: Callable[[Member, int], list[F32]] = Member.pseudo_gradients,
) -> list[str]:
    """Rounds before each of which the state has such a loss, until the guard speaks; returns who has evaluated. `work`
    is what a member contributes to a round."""
    asked, spoken = [], len(events(running, run, "spoilt"))
    for round_, loss in enumerate(losses, start=first):
        asked.append(evaluate(members, round_, loss))
        if len(events(running, run, "spoilt")) == spoken:
            for member, assignment in zip(members, assigned(members, round_), strict=True):
                member.contribute_all(assignment, work(member, round_))
            step_all(members, round_)
            running.await_state(run, round_ + 1)
    return asked


@pytest.mark.covers("security:wrong-majority")
def test_a_risen_loss_pauses_the_run_and_the_operator_may_go_on(shared: InThread, run: str):
    members = crew(shared, run, ["a", "b"], rounds=20, checkpoints=KEPT)
    asked = play(shared, members, run, [5.0, 4.0, 3.0, 3.6, 3.1, 3.6])
    assert asked == ["a", "b", "a", "b", "a", "b"], "two in a row are the word of two"
    assert not events(shared, run, "spoilt")
    assert evaluate(members, 6, 3.7) == "a"
    (event,) = events(shared, run, "spoilt")
    assert "risen to 3.7000 nats per token at state 6; the lowest was 3.0000" in event["message"]
    assert "state 4 is the last one near that. The run is paused" in event["message"]
    assert info(shared, run)["state"] == "paused"
    play_round(members, 6)  # the open one closes
    shared.await_state(run, 7)
    set_state(shared, run, "running")
    play(shared, members, run, [3.7, 3.7, 3.6], first=7)
    assert len(events(shared, run, "spoilt")) == 1, "what was told once is judged anew"
    play(shared, members, run, [4.2, 4.2], first=10)
    assert len(events(shared, run, "spoilt")) == 2


@pytest.mark.covers("security:slow-sabotage")
def test_a_loss_that_stops_falling_names_who_differs_and_nobody_else(
    shared: InThread, run: str, caplog: pytest.LogCaptureFixture
):
    """A third of the signs changed leaves a third of the agreement, which is no reason to leave anybody out."""
    members = crew(shared, run, ["a", "b", "c", "m"], rounds=20)
    flips = np.where(np.arange(max(len(theta) for theta in members[0].theta)) % 3, 1, -1).astype(np.float32)

    def work(member: Member, round_: int) -> list[F32]:
        common, own = members[0].pseudo_gradients(100 + round_), member.pseudo_gradients(round_)
        sent = [of_all + of_one for of_all, of_one in zip(common, own, strict=True)]
        return [values * flips[: len(values)] for values in sent] if member.name == "m" else sent

    play(shared, members, run, [5.0, 4.0, 4.1, 4.0, 4.1], work=work)
    assert events(shared, run, "suspected") == []
    evaluate(members, 5, 4.05)
    (event,) = events(shared, run, "suspected")
    assert (event["data"]["workers"], event["data"]["state"]) == (["m"], 1)
    assert [each.levelname for each in caplog.records if event["message"] in each.getMessage()] == ["WARNING"]
    assert info(shared, run)["state"] == "running"


def test_where_the_spec_wants_no_more_it_is_only_told(shared: InThread, run: str):
    members = crew(shared, run, ["a", "b"], rounds=9, checkpoints=KEPT, guard='action = "tell"\nloss_rise = 2.0')
    play(shared, members, run, [5.0, 4.0, 5.9, 5.9, 6.1, 6.1])
    (event,) = events(shared, run, "spoilt")
    assert event["data"]["state"] == 5
    assert info(shared, run)["state"] == "running"


def test_the_run_goes_back_without_who_stands_out_and_goes_on(shared: InThread, run: str):
    guard = 'action = "rollback"'
    members = crew(shared, run, ["a", "b", "c", "m"], rounds=20, checkpoints=KEPT, guard=guard)

    def work(member: Member, round_: int) -> list[F32]:
        scale = 5 if member.name == "m" and round_ >= 2 else 1
        common, own = members[0].pseudo_gradients(round_), member.pseudo_gradients(round_)
        return [(of_all + of_one * 0.1) * scale for of_all, of_one in zip(common, own, strict=True)]

    play(shared, members, run, [5.0, 4.0, 3.0, 3.2, 3.9, 3.9], work=work)
    wait_until(lambda: info(shared, run)["round"] == 3)
    (spoilt,) = events(shared, run, "spoilt")
    assert "back to state 3; banned: m" in spoilt["message"]
    assert spoilt["data"]["differs"] == "m"
    (event,) = events(shared, run, "rolled-back")
    assert "the guard rolled the run back from state 5 to state 3; banned: m" in event["message"]
    assert info(shared, run)["state"] == "running"
    assert info(shared, run, "/workers/m")["state"] == "banned"


def test_where_nobody_stands_out_the_run_goes_back_and_waits_and_a_second_time_it_only_waits(
    shared: InThread, run: str
):
    members = crew(shared, run, ["a", "b"], rounds=20, checkpoints=KEPT, guard='action = "rollback"')
    play(shared, members, run, [5.0, 3.0, 4.0, 4.0])
    wait_until(lambda: bool(events(shared, run, "rolled-back")))
    assert (info(shared, run)["round"], info(shared, run)["state"]) == (1, "paused")
    set_state(shared, run, "running")
    forget_events(shared, run)  # no decision depends on events, which retention deletes
    members = joined_again(shared, run, ["a", "b"])
    play_rounds(shared, members, [1])
    play(shared, members, run, [4.0, 4.0], first=2)
    assert info(shared, run)["state"] == "paused"
    second = events(shared, run, "spoilt")[-1]
    assert "rolled back to state 1, which did not help" in second["message"]
    assert second["data"]["to"] is None


def test_without_a_checkpoint_of_before_it_waits(shared: InThread, run: str):
    spec = {"checkpoints": "every_rounds = 3\nkeep = 1", "guard": 'action = "rollback"'}
    members = crew(shared, run, ["a", "b"], rounds=20, **spec)
    play(shared, members, run, [5.0, 3.0, 4.0])
    wait_until(lambda: len(info(shared, run, "/checkpoints")["items"]) == 1)
    evaluate(members, 3, 4.0)
    (event,) = events(shared, run, "spoilt")
    assert event["data"]["to"] is None
    assert "No earlier checkpoint" in event["message"]


@pytest.mark.covers("security:slow-poison")
@pytest.mark.parametrize("action", ["tell", "pause", "rollback"])
def test_values_out_of_bounds_pause_any_run(shared: InThread, run: str, action: str):
    spec = {"checkpoints": KEPT, "guard": f'action = "{action}"', "sync": 'aggregation = "mean"'}
    members = crew(shared, run, ["a", "b"], rounds=20, **spec)
    play_round(members, 0)
    for member, assignment in zip(members, assigned(members, 1), strict=True):
        member.contribute_all(assignment, [values * 1e7 for values in member.pseudo_gradients(1)])
    wait_until(lambda: bool(events(shared, run, "spoilt")))
    (event, *_) = events(shared, run, "spoilt")
    assert "state 2, fragment" in event["message"]
    assert f"beyond {BOUND:g}" in event["message"]
    if action == "rollback":
        wait_until(lambda: bool(events(shared, run, "rolled-back")))
        assert info(shared, run)["round"] == 1
    assert info(shared, run)["state"] == "paused"


def test_what_the_guard_wanted_is_done_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lives = Lives(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(rolling_back, "roll_back_if_due", lambda *_, **__: None)  # it dies before the next tick
        with lives.life() as running:
            members = crew(running, "r", ["a", "b"], rounds=20, checkpoints=KEPT, guard='action = "rollback"')
            play(running, members, "r", [5.0, 3.0, 4.0, 4.0])
            assert info(running, "r")["state"] == "paused"
    with lives.life() as running:
        wait_until(lambda: bool(events(running, "r", "rolled-back")))
        assert info(running, "r")["round"] == 1


# --- who is believed --------------------------------------------------------------------------------------------------


@pytest.mark.covers("security:lying-evaluator")
def test_only_who_was_asked_may_tell_the_loss_and_only_once(shared: InThread, run: str):
    _, b = members = crew(shared, run, ["a", "b"], rounds=4, min_workers=2)
    assigned(members, 0)
    problem(b.report_loss(0, 0.012), "not-asked")
    assert evaluate(members, 0, 5.0) == "a"
    assert evaluate(members, 0, 0.012) == "a", "it may be repeated, for an answer may be lost"
    assert info(shared, run, "/rounds/0")["evaluations"]["a"]["loss"] == 5.0
    assert len(events(shared, run, "evaluated")) == 1


@pytest.mark.covers("security:hostile-initial-state")
def test_a_state_0_out_of_bounds_is_refused(shared: InThread, run: str):
    shared.create_run(spec_toml(run))
    member = enlist(shared, run, "a")
    assert member.assignment(None).action == "seed"
    for value in (3e38, -1e6):
        assert "beyond 65504" in problem(member.seed_fragment(0, value), "invalid-payload")["detail"]
    member.seed_fragment(0, BOUND).raise_for_status()
