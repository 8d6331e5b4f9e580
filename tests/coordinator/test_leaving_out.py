"""Who has harmed the model is found by leaving each one out, and the round is done again without it."""

import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import select

from coordinator.store.payloads import fault_in
from coordinator.store.tables import FragmentRow
from coordinator.trust.leaving_out import agreed, harm, has_risen, is_audited, liars
from coordinator.upkeep import redoing, rolling_back
from harness.coordinator import InThread
from harness.member import DATA, F32, Member
from protocol.codecs import CODECS
from protocol.messages import Assignment, WithoutLosses, WithoutReport
from protocol.wire import DIFFERENCES, DeltaHeader, Payload
from tests.coordinator.crew import assigned, events, info, play_round, play_rounds, problem
from tests.coordinator.test_backup import caught_up
from tests.coordinator.test_evaluating import crew_of_tokens
from tests.coordinator.test_restart import Lives
from tests.support.waiting import wait_until
from worker.joining.recovery import recover
from worker.link.client import Client
from worker.state.outer_state import OuterState

# --- pure -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "loss", "expected"),
    [
        ([], 9.0, False),
        ([5.0], 5.5, True),
        ([5.0, 4.0, 3.0], 3.01, False),
        ([5.0, 4.0, 3.0], 3.03, True),
        ([5.0, 4.0, 3.0], math.nan, True),
        ([3.0, 3.1, 3.0, 3.1, 3.0, 3.1], 3.25, False),  # it goes up and down by as much
        ([3.0, 3.1, 3.0, 3.1, 3.0, 3.1], 3.5, True),
    ],
)
def test_a_rise_is_one_beyond_what_is_usual(before: list[float], loss: float, expected: bool):
    assert has_risen(list(enumerate(before)), loss) == expected


def test_the_more_the_loss_falls_the_more_is_audited():
    assert is_audited([(0, 5.0)], 0.99)
    assert is_audited([(0, 5.0), (1, 4.0), (2, 3.5)], 0.99)
    slow = [(100, 2.0), (102, 1.98)]
    assert is_audited(slow, 0.49)
    assert not is_audited(slow, 0.51)
    assert is_audited([(100, 2.0), (102, 2.1)], 0.06)
    assert not is_audited([(100, 2.0), (102, 2.1)], 0.07)


@pytest.mark.parametrize(
    ("without", "before", "expected"),
    [
        ({"a": 3.0, "b": 3.005, "c": 2.995}, 3.0, set()),
        ({"a": 3.02, "b": 3.02, "c": 3.02, "m": 2.9}, 3.0, {"m"}),
        ({"a": 3.02, "b": 3.02, "c": 3.02, "m": 2.9}, 4.0, set()),  # a tenth of what the round gains
        ({"a": 9.0, "b": 9.0, "c": 9.0, "m": 2.9}, 4.0, set()),
        ({"a": 2.5, "b": 2.5, "c": 2.5}, 2.6, set()),  # without any of them it is better: none is the cause
        ({"a": 12.0, "b": 13.0, "c": 12.0, "d": 12.5, "m": 7.0, "n": 8.0}, 4.0, {"m", "n"}),
    ],
)
def test_harmful_is_whose_absence_lowers_the_loss(without: dict[str, float], before: float, expected: set[str]):
    loss = 10.0 if max(without.values()) > 10 else 3.0
    losses = WithoutLosses(loss=loss, without=without)
    assert harm(WithoutReport(reached=losses), before).keys() == expected


def test_what_many_rounds_have_gained_is_not_the_measure_of_one():
    report = WithoutReport(reached=WithoutLosses(loss=3.0, without={"a": 3.02, "b": 3.02, "c": 3.02, "m": 2.95}))
    assert harm(report, 4.0) == {}
    assert harm(report, 4.0, rounds=10) == {"m": (3.0, 2.95)}


@pytest.mark.parametrize(("without_m", "expected"), [(2.985, set()), (2.975, {"m"})])
def test_where_the_next_round_starts_twice_as_much_is_harmful(without_m: float, expected: set[str]):
    reached = WithoutLosses(loss=3.0, without=dict.fromkeys("abcm", 3.0))
    start = WithoutLosses(loss=3.0, without={"a": 3.01, "b": 3.01, "c": 3.01, "m": without_m})
    assert harm(WithoutReport(reached=reached, start=start), 3.0).keys() == expected


OWNERS = {"a": "1", "b": "2", "c": "3", "d": "4", "d2": "4", "m": "5"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": {"m"}}, set()),  # one alone
        ({"a": {"m"}, "b": {"m"}}, {"m"}),
        ({"a": {"m"}, "b": {"m"}, "m": {"a"}}, {"m"}),
        ({"d": {"a"}, "d2": {"a"}}, set()),  # two names of one token
        ({"d": {"a"}, "m": {"a"}, "b": set(), "c": set()}, set()),  # as many say that it is harmless
        ({"m": {"m"}, "a": {"m"}}, set()),  # its own token has no say
        ({"x": {"a"}, "y": {"a"}}, set()),  # unknown ones neither
        ({"a": {"b", "c", "m"}, "d": {"b", "c", "m"}}, set()),  # more than half
    ],
)
def test_more_tokens_than_may_lie_must_agree(found: dict[str, set[str]], expected: set[str]):
    assert agreed(found, OWNERS) == expected


def test_of_six_two_liars_decide_nothing():
    six = {name: name for name in "abcdmn"}
    assert agreed({"m": {"a"}, "n": {"a"}}, six) == set()
    assert agreed({"m": {"a"}, "n": {"a"}, "b": {"m", "n"}, "c": {"m", "n"}, "d": {"m", "n"}}, six) == {"m", "n"}
    assert [liars(tokens) for tokens in (1, 3, 4, 5, 6, 9, 100)] == [1, 1, 1, 1, 2, 2, 2]


# --- of a run ---------------------------------------------------------------------------------------------------------


def evaluate(member: Member, state: int, loss: float, redone: int = 0) -> list[str]:
    """Report the held-out loss of a state; return who is to be left out, one at a time."""
    return list(member.report_loss(state, loss, redone).raise_for_status().json()["without"])


def accuse(member: Member, state: int, loss: float, without: dict[str, float]) -> httpx.Response:
    """Report the loss of a state, and what it is without each worker."""
    path = f"/v1/runs/{member.run}/rounds/{state}/evaluation/without"
    return member.http.put(path, json={"reached": {"loss": loss, "without": without}})


def begin(running: InThread, run: str, evaluators: str = "bcm", **spec: Any) -> list[Member]:
    """A run with its first round done, whose state 1 is to be evaluated by these."""
    members = crew_of_tokens(running, run, "abcm", min_workers=spec.pop("min_workers", 3), **spec)
    for member, assignment in zip(members, assigned(members, 0), strict=True):
        if assignment.evaluate:
            assert evaluate(member, 0, 5.0) == []
    play_rounds(running, members, [0])
    asked = zip(members, assigned(members, 1), strict=True)
    assert [member.name for member, assignment in asked if assignment.evaluate] == list(evaluators)
    return members


def find_harmful(members: list[Member]) -> None:
    """b and c find that the loss is lower without m."""
    _, b, c, m = members
    assert evaluate(m, 1, 4.0) == ["a", "b", "c", "m"]
    accuse(m, 1, 4.0, {"a": 3.0, "b": 4.0, "c": 4.0, "m": 4.0}).raise_for_status()
    for judge in (b, c):
        assert evaluate(judge, 1, 9.0) == ["a", "b", "c", "m"]
        accuse(judge, 1, 9.0, {"a": 11.0, "b": 10.0, "c": 12.0, "m": 4.0}).raise_for_status()


def recovered(member: Member) -> Member:
    """Do what the coordinator says until the member holds the run's state."""
    held, asked = 1, member.assignment(1)
    while asked.action != "train":
        assert (asked.action, asked.round) in {("wait", 1), ("recover", 0), ("recover", 1)}, asked
        held = asked.round if asked.action == "recover" else held
        asked = member.assignment(held)
    return caught_up(member)


def sent(member: Member, assignment: Assignment, fragment: int, values: F32) -> F32:
    """Return a contribution as it arrives."""
    decoded = np.empty_like(values)
    Payload.from_bytes(member.payload(assignment, fragment, values)).decode(decoded)
    return decoded


@pytest.mark.slow
@pytest.mark.covers("security:ascent")
def test_the_round_is_done_again_without_whoever_harmed_it(shared: InThread, run: str):
    a, b, c, m = members = begin(shared, run)
    before = a.assignment(1)
    tokens = info(shared, run)["tokens"]
    old = [a.delta(0, p).headers["etag"] for p in range(len(a.theta))]
    find_harmful(members)
    wait_until(lambda: bool(events(shared, run, "redone")))
    (event,) = events(shared, run, "redone")
    assert (event["data"]["round"], event["data"]["workers"]) == (0, ["m"])
    assert "the held-out loss of state 1 is 4.0000 instead of 9.0000 (b), 4.0000 instead of" in event["message"]
    assert [each["data"]["worker"] for each in events(shared, run, "quarantined")] == ["m"]
    assert info(shared, run)["state"] == "running"
    assert info(shared, run)["tokens"] * 4 == tokens * 3, "its units return to the pool"
    new = [a.delta(0, p) for p in range(len(a.theta))]
    assert not {each.headers["etag"] for each in new} & set(old)
    header = Payload.from_bytes(new[0].content).header
    assert isinstance(header, DeltaHeader)
    assert [each.worker for each in header.contributors] == ["a", "b", "c"]

    problem(a.contribute(before, 0, a.theta[0]), "stale-base")
    problem(b.report_loss(1, 9.0), "not-asked")  # it has measured the old state
    honest = [recovered(member) for member in (a, b, c)]
    assert m.assignment(0).action == "recover"
    assert "quarantine" in m.assignment(1).reason
    refused = problem(b.report_loss(1, 9.0), "not-asked")  # nor when it has dropped that state: it was long on its way
    assert "measured for an assignment with redone = 0, and 1 rounds were done again" in refused["detail"]
    assert b.assignment(1).evaluate
    assert evaluate(b, 1, 4.0, b.assignment(1).redone)
    play_rounds(shared, honest, [1])
    assert info(shared, run)["divergences"] == 0
    listed = info(shared, run, "/units/ranges?limit=1000")["items"]
    assert all(each["state"] == "consumed" for each in listed if each["start"] < 20), "m's units are trained again"


@pytest.mark.slow
@pytest.mark.covers("security:ascent")
def test_an_evaluator_gets_what_makes_the_state_without_a_worker(shared: InThread, run: str):
    a, b, _, _ = members = begin(shared, run)
    assert evaluate(b, 1, 9.0)
    path = f"/v1/runs/{run}/rounds/1/fragments/0/without/m"
    problem(a.http.get(path), "not-asked")
    problem(b.http.get(path.replace("rounds/1", "rounds/0")), "not-asked")
    got = Payload.from_bytes(b.http.get(path).raise_for_status().content)
    assignment = a.assignment(1)  # of as many units as in round 0
    each = [sent(member, assignment, 0, member.pseudo_gradients(0)[0]) for member in members]
    without_m, whole = (np.sum([values * np.float32(1 / len(of)) for values in of], 0) for of in (each[:3], each))
    codec, expected, found = CODECS[DIFFERENCES], np.empty_like(whole), np.empty_like(whole)
    raw = np.empty(codec.size(len(whole)), np.uint8)
    codec.encode(without_m - whole, raw)
    codec.decode(raw, expected)
    got.decode(found)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.covers("security:lying-evaluator")
def test_one_evaluator_alone_leaves_nobody_out(shared: InThread, run: str):
    _, b, c, m = members = begin(shared, run)
    assert evaluate(m, 1, 9.0)
    accuse(m, 1, 9.0, {"a": 4.0, "b": 9.0, "c": 9.0, "m": 9.0}).raise_for_status()
    for judge in (b, c):
        assert evaluate(judge, 1, 4.5), "the first rounds are always audited"
        accuse(judge, 1, 4.5, {"a": 4.6, "b": 4.6, "c": 4.6, "m": 4.6}).raise_for_status()
    play_rounds(shared, members, [1])
    assert not events(shared, run, "redone")
    problem(accuse(members[0], 1, 1.0, {"b": 1.0}), "not-asked")


@pytest.mark.slow
def test_a_worker_without_which_there_are_too_few_takes_part_and_does_not_count(shared: InThread, run: str):
    members = begin(shared, run, min_workers=4)
    find_harmful(members)
    wait_until(lambda: bool(events(shared, run, "redone")))
    members = [recovered(member) for member in members]
    play_rounds(shared, members, [1])
    verdicts = info(shared, run, "/rounds/1")["fragments"][0]["verdicts"]
    assert {worker: verdict["factor"] for worker, verdict in verdicts.items()} == {"a": 1, "b": 1, "c": 1, "m": 0}
    assert len(events(shared, run, "quarantined")) == 1
    assert not events(shared, run, "screened")


@pytest.mark.slow
def test_the_last_round_is_done_again_too(shared: InThread, run: str):
    a, b, *_ = begin(shared, run, "abc", rounds=1)
    before = info(shared, run)["state_digest"]
    for judge in (a, b):
        assert "m" in evaluate(judge, 1, 9.0)
        accuse(judge, 1, 9.0, {"a": 11.0, "b": 10.0, "c": 12.0, "m": 4.0}).raise_for_status()
    wait_until(lambda: bool(events(shared, run, "redone")))
    wait_until(lambda: info(shared, run)["state_digest"] not in (None, before))
    assert info(shared, run)["state"] == "finished"
    assert [b.assignment(1).round, b.assignment(0).round] == [0, 1]
    asked = b.assignment(1)
    assert (asked.action, asked.evaluate) == ("finish", True)
    evaluate(b, 1, 4.0, asked.redone)
    assert info(shared, run)["held_out_loss"] == 4.0
    wait_until(lambda: [each["round"] for each in info(shared, run, "/checkpoints")["items"]] == [1, 0])
    client, layout = Client(shared.client(), run, shared.admin_token), b.joined.layout
    state = OuterState(layout, b.spec.outer, pin_memory=False)
    for target, held in ((1, None), (0, 1)):  # sent back, a worker must get there, whatever checkpoint is the newest
        recover(client, b.spec, state, target, held=held)
        assert state.round == target


@pytest.mark.slow
def test_a_start_keeps_the_checkpoint_before_a_round_that_may_be_done_again(tmp_path: Path):
    """The tokens were not known yet, and it was deleted. Workers that were sent back to it loaded the one after it, so
    they were sent back again, for ever."""
    lives = Lives(tmp_path / "data")
    for life in range(2):
        with lives.life() as running:
            if life == 0:
                begin(running, "r", checkpoints="every_rounds = 1\nkeep = 1")
            wait_until(lambda: [each["round"] for each in info(running, "r", "/checkpoints")["items"]] == [1, 0])


@pytest.mark.slow
def test_sent_back_without_a_checkpoint_a_worker_holds_no_state(shared: InThread, run: str):
    members = crew_of_tokens(shared, run, "ab", checkpoints="every_rounds = 1\nkeep = 1")
    assigned(members, 0)
    play_round(members, 0)
    wait_until(lambda: [each["round"] for each in info(shared, run, "/checkpoints")["items"]] == [1])
    client, member = Client(shared.client(), run, shared.admin_token), members[0]
    state = OuterState(member.joined.layout, member.spec.outer, pin_memory=False)
    for target, held, reached in ((1, None, 1), (0, 1, None), (1, None, 1)):
        recover(client, member.spec, state, target, held=held)
        assert state.round == reached


@pytest.mark.slow
def test_nobody_is_left_out_of_a_private_run(shared: InThread, run: str):
    """An evaluator could compute each contribution."""
    own = DATA.model_copy(update={"digest": None})
    members = crew_of_tokens(shared, run, "abcm", own, min_workers=4, data="private = true")
    play_rounds(shared, members, [0])
    asked = [member for member, each in zip(members, assigned(members, 1), strict=True) if each.evaluate]
    assert evaluate(asked[0], 1, 9.0) == []


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.covers("reliability:rollback")
@pytest.mark.parametrize("point", ["order", "deltas", "rows", "checkpoint", "blobs"])
def test_killed_at_any_point_the_next_start_does_it_or_has_done_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
):
    lives = Lives(tmp_path / "data")

    def dies(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, lives.life() as running:
        patch.setattr("coordinator.service.redoing.redo_if_due", lambda *_, **__: None)
        members = begin(running, "r")
        find_harmful(members)
        live = running.live("r")
        assert live.redo is not None
        wait_until(lambda: not live.outer.any_job_running)
        patch.setattr(live, "restored", lambda opening: None)  # nothing follows: it is dead
        if point != "order":
            live.redo.made = [redoing.make_fragment(live, live.redo, row) for row in rows_of(live)]
        if point in ("rows", "checkpoint", "blobs"):
            at = {
                "rows": (live.blobs, "put"),
                "checkpoint": (live.outer, "begin"),
                "blobs": (rolling_back, "set_aside"),
            }[point]
            patch.setattr(*at, dies)
            with live.lock, pytest.raises(KeyboardInterrupt):
                redoing.put_in_place(live, live.redo, live.redo.made or [])
    with lives.life() as running:
        wait_until(lambda: len(events(running, "r", "redone")) == 1)
        assert not events(running, "r", "restored-from-backup")
        live = running.live("r")
        wait_until(lambda: live.redo is None and all(each.round == 1 for each in live.outer.states))
        for (round_, fragment), found in live.outer.deltas.items():
            assert fault_in(live.blobs, live.names.delta(round_, fragment, found), found) is None
        told = [member.assignment(1) for member in members[:3]]
        assert [(each.action, each.round) for each in told] == 3 * [("recover", 0)], "they may hold the old state"
        honest = [caught_up(member) for member in members[:3]]
        for member in honest:
            member.assignment(0)  # and are sent to the new one
        play_rounds(running, honest, [1])
        assert info(running, "r")["divergences"] == 0


@pytest.mark.slow
def test_a_round_whose_contributions_are_lost_stands_and_the_worker_is_excluded(tmp_path: Path):
    lives = Lives(tmp_path / "data")
    with lives.life() as running:
        members = begin(running, "r")
        live = running.live("r")
        lost = [name for name, _ in live.blobs.list(live.names.kind("contributions")) if ".a." in name]
        live.blobs.delete(*lost)
        digest = members[0].delta(0, 0).headers["etag"]
        find_harmful(members)
        wait_until(lambda: bool(events(running, "r", "redone")))
        assert members[0].delta(0, 0).headers["etag"] == digest
    with lives.life() as running:
        (event,) = events(running, "r", "redone")
        assert event["data"] == {"round": 0, "workers": ["m"], "place": None}
        assert "cannot be done again" in event["message"]
        assert len(events(running, "r", "quarantined")) == 1
        assert running.live("r").redo is None


def rows_of(live: Any) -> list[Any]:
    with live.context.database.read() as session:
        query = select(FragmentRow).where(FragmentRow.run_id == live.id, FragmentRow.round == 0)
        return list(session.scalars(query.order_by(FragmentRow.fragment)))
