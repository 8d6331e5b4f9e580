"""A run that goes back to a checkpoint: as it was then, whatever was open, killed in the middle or not."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.store.identity import Actor
from coordinator.sync import outer_state
from coordinator.upkeep import rolling_back
from harness.coordinator import InThread
from harness.member import Member
from harness.stores import read
from protocol.messages import RollBack
from tests.coordinator.crew import crew, enlist, events, info, play_rounds, problem, ready, set_state
from tests.coordinator.test_backup import caught_up
from tests.coordinator.test_restart import Lives
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KEPT = "every_rounds = 1\nkeep = 20"


def roll_back(running: InThread, run: str, to: int, **fields: Any) -> httpx.Response:
    """Roll back. While a job works on the run's files, that is answered 503; one may begin at any time."""
    replies = list[httpx.Response]()

    def answered() -> bool:
        replies.append(order_back(running, run, to, **fields))
        return replies[-1].status_code != 503

    wait_until(answered)
    return replies[-1]


def order_back(running: InThread, run: str, to: int, **fields: Any) -> httpx.Response:
    with running.client() as admin:
        order = {"to": to, "from_round": admin.get(f"/v1/runs/{run}").json()["round"]} | fields
        return admin.post(f"/v1/runs/{run}/rollback", json=order)


def joined_again(running: InThread, run: str, names: list[str]) -> list[Member]:
    return [caught_up(enlist(running, run, name)) for name in names]


def played(running: InThread, run: str, over: int, rounds: int = 6, **spec: Any) -> list[Member]:
    """A run whose first rounds are over, with a checkpoint of each state."""
    members = crew(running, run, ["a", "b"], checkpoints=KEPT, rounds=rounds, **spec)
    play_rounds(running, members, range(over))
    return members


def digests(running: InThread, run: str) -> dict[int, str]:
    return {each["round"]: each["state_digest"] for each in info(running, run, "/checkpoints")["items"]}


@pytest.mark.covers("security:slow-poison")
def test_the_run_is_at_the_checkpoint_again_and_the_same_rounds_lead_to_the_same_states(shared: InThread, run: str):
    members = played(shared, run, 4, rounds=6)
    before, epochs = digests(shared, run), info(shared, run, "/units")
    assert roll_back(shared, run, 2).json()["round"] == 2
    (event,) = events(shared, run, "rolled-back")
    assert "the operator rolled the run back from state 4 to state 2" in event["message"]
    assert (event["data"]["from_round"], event["data"]["without"]) == (4, [])
    assert info(shared, run)["tokens"] == 2 * 2 * 5 * 32, "those of the rounds that are left"
    assert set(digests(shared, run)) == {0, 1, 2}
    problem(members[0].http.put(members[0].path("/lease"), json={}), "unauthorized")
    members = joined_again(shared, run, ["a", "b"])
    play_rounds(shared, members, range(2, 4))
    assert digests(shared, run) == before, "as if nothing had happened"
    assert info(shared, run, "/units") == epochs
    play_rounds(shared, members, range(4, 6))
    assert info(shared, run)["divergences"] == 0
    assert info(shared, run)["tokens"] == 2 * 6 * 5 * 32


def test_what_was_of_later_rounds_is_set_aside_with_its_rows(shared: InThread, run: str):
    played(shared, run, 3)
    roll_back(shared, run, 1)
    live = shared.live(run)
    aside = {name.removeprefix(live.names.set_aside) for name, _ in live.blobs.list(live.names.set_aside)}
    folders = {name.rpartition("/")[0] for name in aside}
    assert {"0", "0/deltas/1", "0/deltas/2", "0/checkpoints/2", "0/checkpoints/3"} <= folders
    assert not {name for name in aside if "/deltas/0/" in name or "/checkpoints/1/" in name}
    rows = json.loads(read(live.blobs, f"{live.names.set_aside}0/rows.json"))
    assert {row["worker"] for row in rows["contributions"]} == {"a", "b"}
    assert {row["round"] for row in rows["fragments"]} >= {1, 2}
    assert rows["fragments"][0]["verdicts"]["a"]["factor"] == 1
    assert {row["round"] for row in rows["checkpoints"]} == {2, 3}


def test_an_open_round_is_given_up_with_what_was_contributed_to_it(shared: InThread, run: str):
    a, b = played(shared, run, 2, rounds=4, min_workers=2)
    ready([a, b], 2)
    late = a.take_part(2)
    assert info(shared, run)["tokens"] == (4 + 1) * 5 * 32
    assert roll_back(shared, run, 2).json()["round"] == 2
    assert info(shared, run)["tokens"] == 4 * 5 * 32
    members = joined_again(shared, run, ["a", "b"])
    ready(members, 2)
    assert members[0].assignment(2).units == late.units, "they are trained on again"
    play_rounds(shared, members, range(2, 4))


def test_a_worker_that_holds_a_state_of_the_same_number_as_before_is_found_out(shared: InThread, run: str):
    _, b = played(shared, run, 2, rounds=4)
    roll_back(shared, run, 1)
    (other,) = joined_again(shared, run, ["a"])
    other.assignment(1)
    assignment = other.assignment(1)
    for fragment, values in enumerate(other.pseudo_gradients(1)):
        other.contribute(assignment, fragment, values * 2).raise_for_status()
    other.step(1)
    b.join(shared.admin_token)  # with the state that it had before
    other.assignment(2)
    assignment = b.assignment(2)
    assert assignment.action == "train", "its number is the run's"
    problem(b.contribute(assignment, 0, b.pseudo_gradients(2)[0]), "stale-base")
    assert info(shared, run)["divergences"] == 1


def test_a_worker_may_be_left_out_until_it_is_readmitted(shared: InThread, run: str):
    played(shared, run, 2)
    assert roll_back(shared, run, 1, without=["b"]).is_success
    assert info(shared, run, "/workers/b")["state"] == "banned"
    (event,) = events(shared, run, "rolled-back")
    assert "banned: b" in event["message"]
    again = Member(shared.client(), run, "b")
    problem(again.ask_to_join(shared.admin_token), "banned")
    set_state(shared, f"{run}/workers/b", "readmitted")
    again.join(shared.admin_token)


@pytest.mark.parametrize("state", ["finished", "stopped", "paused"])
def test_a_run_that_had_ended_is_paused_and_can_go_on(shared: InThread, run: str, state: str):
    played(shared, run, 2, rounds=2 if state == "finished" else 3)
    if state != "finished":
        set_state(shared, run, state)
    assert info(shared, run)["state"] == state
    assert roll_back(shared, run, 1).json()["state"] == "paused"
    set_state(shared, run, "running")
    members = joined_again(shared, run, ["a", "b"])
    play_rounds(shared, members, range(1, 2))


def test_what_cannot_be_gone_back_to_is_refused_and_nothing_has_changed(shared: InThread, run: str):
    a, b = played(shared, run, 2, rounds=4)
    before = info(shared, run)
    refusal = problem(roll_back(shared, run, 3), "not-found")
    assert "no checkpoint 3; those kept are: 0, 1, 2" in refusal["detail"]
    assert "never had a worker ghost" in problem(roll_back(shared, run, 1, without=["ghost"]), "not-found")["detail"]
    assert "rolled back meanwhile" in problem(roll_back(shared, run, 1, from_round=3), "rolled-back")["detail"]
    problem(roll_back(shared, run, 1 << 63), "invalid-message")  # the database has no such number
    live = shared.live(run)
    (name,) = [name for name, _ in live.blobs.list(f"{live.names.kind('checkpoints')}1/") if "/1/0." in name]
    live.blobs.delete(name)
    assert "fragment 0 of checkpoint 1 is damaged" in problem(roll_back(shared, run, 1), "not-found")["detail"]
    live.outer.jobs[0].running = True
    try:
        problem(order_back(shared, run, 2), "not-ready")
    finally:
        live.outer.jobs[0].running = False
    after = info(shared, run)
    passing = {"disk_bytes": None, "eta_s": None}
    assert after | passing == before | passing
    play_rounds(shared, [a, b], range(2, 4))


@pytest.mark.covers("reliability:rollback")
@pytest.mark.parametrize("point", ["rows", "checkpoint", "half of the blobs"])
def test_killed_in_the_middle_it_is_done_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str):
    """After the transaction nothing can undo it, and nothing is told twice."""
    lives = Lives(tmp_path / "data")
    with lives.life() as running:
        played(running, "r", 4, rounds=6)
        before = digests(running, "r")
        live = running.live("r")
        rename, done = live.blobs.rename, iter(range(2 if point == "half of the blobs" else 0))

        def dies(*arguments: Any) -> None:
            """At once, or after two blobs."""
            if next(done, None) is None:
                raise KeyboardInterrupt
            rename(*arguments)

        with monkeypatch.context() as patch:
            if point == "rows":
                patch.setattr(outer_state, "fetch_checkpoint", dies)
            elif point == "checkpoint":
                patch.setattr(rolling_back, "set_aside", dies)
            else:
                patch.setattr(live.blobs, "rename", dies)
            patch.setattr(live, "restored", lambda opening: None)  # nothing follows: it is dead
            order = RollBack(to=2, from_round=4)
            with pytest.raises(KeyboardInterrupt):
                rolling_back.roll_back(live, order, Actor(), verifying=lambda: False)
    with lives.life() as running:
        assert info(running, "r")["round"] == 2
        assert len(events(running, "r", "rolled-back")) == 1
        assert not events(running, "r", "restored-from-backup")
        live = running.live("r")
        aside = {name.split("/")[3] for name, _ in live.blobs.list(live.names.set_aside)}
        assert aside == {"0"}
        members = joined_again(running, "r", ["a", "b"])
        play_rounds(running, members, range(2, 6))
        after = digests(running, "r")
        assert {round_: after[round_] for round_ in before} == before
        assert info(running, "r")["divergences"] == 0
