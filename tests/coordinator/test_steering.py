"""Pause, resume, drain and stop, in every state of a run."""

from pathlib import Path

import pytest

from coordinator.rounds.steering import CHANGES, change_state
from coordinator.run.live_run import LiveRun
from coordinator.store.identity import Actor
from coordinator.sync import outer_state
from harness.coordinator import InThread, SettableClock
from harness.member import Member, spec_toml
from protocol.messages import RunState
from tests.coordinator.crew import (
    crew,
    enlist,
    events,
    info,
    play_round,
    play_rounds,
    problem,
    ready,
    recovered,
    set_state,
)
from tests.coordinator.test_restart import Lives, checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SITUATIONS = ["before seeding", "seeding", "between rounds", "open round", "half contributed", "finished"]
REQUESTS = ["paused", "draining", "running", "stopped"]


def bring_into(running: InThread, run: str, situation: str) -> list[Member]:
    """A run of two rounds in that situation, and its members."""
    if situation == "before seeding":
        running.create_run(spec_toml(run))
        return []
    if situation == "seeding":
        running.create_run(spec_toml(run))
        member = enlist(running, run, "a")
        assert member.assignment(None).action == "seed"
        member.seed_fragment(0, 0.5).raise_for_status()
        return [member]
    members = a, b = crew(running, run, ["a", "b"], min_workers=2)
    if situation in ("open round", "half contributed"):
        ready(members, 0)
    if situation == "half contributed":
        a.take_part(0)
        assert b.assignment(0).action == "train"
    if situation == "finished":
        play_rounds(running, members, range(2))
    return members


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("first", REQUESTS)
@pytest.mark.parametrize("second", REQUESTS)
def test_every_request_in_every_state_does_what_the_table_says_and_nothing_is_stuck(
    shared: InThread, run: str, situation: str, first: str, second: str
) -> None:
    members = bring_into(shared, run, situation)
    with shared.client() as admin:
        for state in (first, second):
            before = shared.live(run).state
            reply = admin.patch(f"/v1/runs/{run}", json={"state": state})
            allowed = RunState(state) is before or RunState(state) in CHANGES[before]
            assert reply.is_success == allowed, reply.text
            if allowed:
                drained_at_once = state == "draining" and not members
                assert shared.live(run).state == ("paused" if drained_at_once else state)
            else:
                problem(reply, "run-ended")
    live = shared.live(run)
    directives = {RunState.STOPPED: "stop", RunState.FINISHED: "stop", RunState.DRAINING: "drain"}
    for member in members:
        reply = member.http.put(member.path("/lease"), json={}).json()
        assert reply["directive"] == directives.get(live.state, "continue")
    if live.state is RunState.STOPPED:
        assert all(member.assignment(0).action == "finish" for member in members)
    elif live.state is RunState.FINISHED:
        assert all(member.assignment(2).action == "finish" for member in members)
    else:
        set_state(shared, run, "running")
        finish(shared, run, situation, members)
        assert info(shared, run)["state"] == "finished"


def finish(running: InThread, run: str, situation: str, members: list[Member]) -> None:
    """Play what is left of the two rounds."""
    if situation in ("before seeding", "seeding"):
        member = members[0] if members else enlist(running, run, "a")
        assert member.assignment(None).action == "seed"
        member.seed()
        members = [member]
    play_rounds(running, members, range(2))


def test_a_paused_run_closes_its_round_and_opens_no_other(shared: InThread, run: str) -> None:
    members = bring_into(shared, run, "open round")
    set_state(shared, run, "paused")
    for member in members:
        member.take_part(0)
    for member in members:
        member.step(0)
        assert member.assignment(1).action == "wait"
        assert member.assignment(1).reason == "the run is paused"


def test_a_drained_run_finishes_its_round_sends_everybody_home_and_can_go_on(shared: InThread, run: str) -> None:
    members = a, b = bring_into(shared, run, "open round")
    late = enlist(shared, run, "late")
    set_state(shared, run, "draining")
    assert late.assignment(0).action == "finish"
    late.http.delete(late.path()).raise_for_status()
    for member in members:
        member.take_part(0)
    for member in members:
        member.step(0)
        assert member.assignment(1).action == "finish"
        assert info(shared, run)["state"] == "draining"
        member.http.delete(member.path()).raise_for_status()
    assert info(shared, run)["state"] == "paused"
    assert len(events(shared, run, "drained")) == 1
    wait_until(lambda: info(shared, run, "/checkpoints")["items"][0]["round"] == 1)
    set_state(shared, run, "running")
    for member in (a, b):
        member.join(shared.admin_token)
    assert a.assignment(1).action == "wait"
    assert b.assignment(1).action == "train"


def test_a_draining_round_that_needs_another_worker_lets_it_in(shared: InThread, run: str) -> None:
    a, b = bring_into(shared, run, "half contributed")
    set_state(shared, run, "draining")
    b.http.delete(b.path()).raise_for_status()
    recovered(enlist(shared, run, "c")).take_part(0)
    a.step(0)
    assert a.assignment(1).action == "finish"


@pytest.mark.parametrize("state", ["paused", "draining", "stopped"])
def test_a_run_at_rest_keeps_a_checkpoint_of_its_last_state_also_after_a_restart(tmp_path: Path, state: str) -> None:
    lives = Lives(tmp_path / "data")
    with lives.life() as running:
        a, b = crew(running, "r", ["a", "b"], rounds=9)
        for round_ in range(2):
            play_round([a, b], round_)
        if state != "stopped":  # which gives the open round up
            set_state(running, "r", state)
        play_round([a, b], 2)
        set_state(running, "r", state)
        running.await_state("r", 3)
        wait_until(lambda: info(running, "r", "/checkpoints")["items"][0]["round"] == 3)
    with lives.database() as database, database.write() as session:
        session.connection().exec_driver_sql("DELETE FROM checkpoints WHERE round = 3")
        session.connection().exec_driver_sql("DELETE FROM checkpoint_fragments WHERE round = 3 AND fragment = 1")
    with lives.life() as running:
        wait_until(lambda: info(running, "r", "/checkpoints")["items"][0]["round"] == 3)
        assert checkpoint(running, "latest") == [a.base(p).hex() for p in (0, 1)]


def test_a_run_that_is_stopped_while_its_last_step_ends_keeps_a_checkpoint_all_the_same(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the step's look at whether the run is at rest, and its end."""
    (a,) = crew(shared, run, ["a"], rounds=9)
    keep = outer_state.checkpoint_at_rest

    def keep_and_stop(live: LiveRun, fragment: int) -> None:
        keep(live, fragment)
        if live.name == run and live.outer.states[fragment].round == 1 and live.state is RunState.RUNNING:
            change_state(live, RunState.STOPPED, Actor())

    monkeypatch.setattr(outer_state, "checkpoint_at_rest", keep_and_stop)
    play_round([a], 0)
    wait_until(lambda: info(shared, run, "/checkpoints")["items"][0]["round"] == 1)


# --- newcomers and those who stay -------------------------------------------------------------------------------------


def test_a_draining_run_takes_no_newcomers_until_it_is_paused(shared: InThread, run: str) -> None:
    members = bring_into(shared, run, "open round")
    set_state(shared, run, "draining")
    late = Member(shared.client(), run, "late")
    for _ in range(2):
        reply = late.ask_to_join(shared.admin_token)
        detail = problem(reply, "run-draining")["detail"]
        assert "takes no newcomers" in detail
        assert reply.headers["Retry-After"] == "5"
        if info(shared, run)["round"] == 0:
            play_round(members, 0)
    assert [each["name"] for each in info(shared, run, "/workers")["items"]] == ["a", "b"]
    for member in members:
        assert member.assignment(1).action == "finish"
        member.http.delete(member.path()).raise_for_status()
    assert info(shared, run)["state"] == "paused"
    late.join(shared.admin_token)
    assert late.assignment(None).action == "recover"


def test_a_member_that_crashed_comes_back_into_a_draining_run_to_finish_its_round(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    a, b, c = crew(shared, run, ["a", "b", "c"], min_workers=2)
    ready([a, b, c], 0)
    set_state(shared, run, "draining")
    clock.advance(61)
    for member in (b, c):
        member.http.put(member.path("/lease"), json={}).raise_for_status()
    shared.coordinator.tick()
    assert info(shared, run, "/workers/a")["state"] == "lost"
    again = Member(shared.client(), run, "a")
    again.join(shared.admin_token)
    for member in (recovered(again), b, c):
        member.take_part(0)
    assert info(shared, run, "/rounds/0")["fragments"][0]["contributors"] == ["a", "b", "c"]
    b.step(0)
    assert b.assignment(1).action == "finish"


def test_a_live_worker_that_restarts_is_no_newcomer(shared: InThread, run: str) -> None:
    bring_into(shared, run, "open round")
    c = enlist(shared, run, "c")
    set_state(shared, run, "draining")
    again = Member(shared.client(), run, "c")
    again.join(shared.admin_token, previous=c.joined.member_token)
    assert again.assignment(0).action == "finish"


@pytest.mark.parametrize("state", ["draining", "stopped"])
def test_who_does_not_leave_when_all_are_told_to_is_evicted_after_half_an_hour(
    shared: InThread, run: str, clock: SettableClock, state: str
) -> None:
    """A draining run was once held up for ever by a member that only beat."""
    a, b = crew(shared, run, ["a", "b"], rounds=9, members="lease_s = 86400")
    ready([a, b], 0)
    set_state(shared, run, state)
    if state == "draining":
        clock.advance(3000)
        shared.coordinator.tick()
        assert len(events(shared, run, "evicted")) == 0, "their round is open"
        play_round([a, b], 0)
    shared.coordinator.tick()
    a.http.delete(a.path()).raise_for_status()
    for seconds, evicted in ((1800, 0), (1, 1)):
        clock.advance(seconds)
        b.http.put(b.path("/lease"), json={}).raise_for_status()
        shared.coordinator.tick()
        assert len(events(shared, run, "evicted")) == evicted
    assert "it has not left for 1800 s" in events(shared, run, "evicted")[0]["message"]
    assert info(shared, run)["state"] == {"draining": "paused"}.get(state, state)
    problem(b.http.put(b.path("/lease"), json={}), "unauthorized")


def test_a_drain_that_is_called_off_begins_anew(shared: InThread, run: str, clock: SettableClock) -> None:
    crew(shared, run, ["a"], rounds=9, members="lease_s = 86400")
    for _ in range(3):
        set_state(shared, run, "draining")
        clock.advance(1000)
        shared.coordinator.tick()
        set_state(shared, run, "running")
        shared.coordinator.tick()
    assert info(shared, run, "/workers/a")["state"] == "live"
