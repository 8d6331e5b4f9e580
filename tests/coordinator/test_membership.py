"""Joining, leases, leaving and being lost; who gets which work; who seeds; what the operator may do to a run."""

import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from coordinator.rounds import leases
from coordinator.run.live_run import LiveRun
from coordinator.store.identity import Actor
from coordinator.store.tables import UnitRangeRow, WorkerRow
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import DATA, TENSORS, Member, spec_toml
from protocol.errors import Problem
from protocol.fragments import TensorSpec
from protocol.messages import DataSummary, FrozenSummary, JoinRequest, LeaveRequest, Metrics, data_difference
from protocol.spec.sections import DataSpec
from tests.coordinator.crew import crew, enlist, events, info, play_round, play_rounds, problem, ready, recovered
from tests.support.waiting import PATIENCE_S

MINUTE = "lease_s = 60"


def heartbeat(member: Member) -> int:
    return member.http.put(member.path("/lease"), json={}).status_code


def units_of(running: InThread, run: str, state: str) -> list[tuple[int, int]]:
    with running.coordinator.database.read() as session:
        rows = session.scalars(
            select(UnitRangeRow)
            .where(UnitRangeRow.run_id == running.live(run).id, UnitRangeRow.state == state)
            .order_by(UnitRangeRow.start)
        )
        return [(row.start, row.stop) for row in rows]


# --- joining ------------------------------------------------------------------------------------------------------


def test_joining_gives_a_member_token_a_lease_and_the_layout(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, members=MINUTE))
    member = enlist(shared, run, "w")
    assert member.joined.worker == "w"
    assert member.joined.epoch == 1
    assert member.joined.lease_s == 60
    assert member.joined.layout.elements == [488, 489]
    assert heartbeat(member) == 200
    shown = info(shared, run, "/workers/w")
    assert shown["state"] == "live"
    assert shown["last_seen_s"] == 0


@pytest.mark.covers("reliability:ended-lease")
def test_a_live_workers_name_is_taken_and_the_refusal_says_until_when(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    shared.create_run(spec_toml(run, members=MINUTE))
    first = enlist(shared, run, "w")
    clock.advance(15.5)
    second = Member(shared.client(), run, "w")
    refused = second.ask_to_join()
    assert "its lease ends in 44 s" in problem(refused, "worker-name-taken")["detail"]
    assert refused.headers["retry-after"] == "45"
    problem(second.ask_to_join(previous=shared.admin_token), "worker-name-taken")  # no token of its member
    assert heartbeat(first) == 200


def test_the_same_worker_restarted_rejoins_at_once_keeps_its_units_and_its_old_token_ends(
    shared: InThread, run: str
) -> None:
    (member,) = crew(shared, run, ["w"], members=MINUTE)
    units = member.assignment(0).units
    again = Member(shared.client(), run, "w")
    again.join(shared.admin_token, previous=member.joined.member_token)
    assert again.joined.epoch == 2
    problem(member.http.put(member.path("/lease"), json={}), "unauthorized")
    assert heartbeat(again) == 200
    assert recovered(again).assignment(0).units == units


@pytest.mark.covers("security:hostile-first-worker")
def test_another_model_is_refused_and_the_tensor_named(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    enlist(shared, run, "w")
    other = [TENSORS[0], TensorSpec(name="b", shape=[78])]
    refused = Member(shared.client(), run, "v", tensors=other).ask_to_join()
    assert "its tensor b is [78], the run's is [77]" in problem(refused, "model-mismatch")["detail"]
    assert [worker["name"] for worker in info(shared, run, "/workers")["items"]] == ["w"]


def test_those_that_wait_for_a_worker_learn_why_it_cannot_join(shared: InThread, run: str) -> None:
    """Another vocabulary on the second box: the first one waited for ever and gave no reason."""
    (first,) = crew(shared, run, ["w"], min_workers=2)
    other = Member(shared.client(), run, "v", tensors=[TENSORS[0], TensorSpec(name="b", shape=[78])])
    for _ in range(3):  # it may be restarted again and again
        detail = problem(other.ask_to_join(), "model-mismatch")["detail"]
    assert first.assignment(0).reason.endswith(f"1 of at least 2 are ready; v cannot join: {detail}")
    (event,) = events(shared, run, "refused")
    assert (event["data"]["worker"], event["message"]) == ("v", f"v cannot join: {detail}")
    taken = Member(shared.client(), run, "w", tensors=other.tensors)
    problem(taken.ask_to_join(), "model-mismatch")
    assert len(events(shared, run, "refused")) == 1, "w has joined: whoever uses its name is not that worker"
    recovered(enlist(shared, run, "v"))
    assert "cannot join" not in first.assignment(0).reason


@pytest.mark.parametrize("data", [None, DATA.model_copy(update={"digest": "cd" * 32})], ids=["none", "other files"])
def test_another_training_set_is_refused_and_both_are_named(
    shared: InThread, run: str, data: DataSummary | None
) -> None:
    shared.create_run(spec_toml(run))
    enlist(shared, run, "w")
    refused = Member(shared.client(), run, "v", data=data).ask_to_join()
    detail = problem(refused, "data-mismatch")["detail"]
    assert "abab" in detail
    assert ("cdcd" in detail) == (data is not None)
    assert "`outerstep data show DIR`" in detail


def test_other_line_ends_are_named_with_their_file(shared: InThread, run: str) -> None:
    """Git on Windows writes CRLF. The digest alone did not say so, on either side."""
    shared.create_run(spec_toml(run))
    windows = DATA.model_copy(update={"digest": "cd" * 32, "crlf": "deep/a.txt"})
    enlist(shared, run, "w")
    detail = problem(Member(shared.client(), run, "v", data=windows).ask_to_join(), "data-mismatch")["detail"]
    assert "lines of deep/a.txt end with CRLF, as on Windows, on this worker, but nowhere on the first" in detail
    said = data_difference(DATA, windows, DataSpec()) or ""
    assert "lines of deep/a.txt end with CRLF, as on Windows, on the first worker, but nowhere on this one" in said
    both = data_difference(windows, windows.model_copy(update={"units": 9}), DataSpec())
    assert "is not the run's" in (both or "")
    assert "CRLF" not in (both or "")
    same = DATA.model_copy(update={"crlf": "a.txt"})
    assert data_difference(DATA, same, DataSpec()) is None, "of a token set nobody knows"


FROZEN = FrozenSummary(digest="ab" * 32, elements=5)


def test_frozen_parameters_are_those_of_the_first_worker(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    assert Member(shared.client(), run, "w").ask_to_join(frozen=FROZEN).status_code == 200
    assert info(shared, run)["frozen"] == FROZEN.model_dump()
    assert Member(shared.client(), run, "v").ask_to_join(frozen=FROZEN).status_code == 200
    for frozen in (FROZEN.model_copy(update={"digest": "cd" * 32}), FROZEN.model_copy(update={"elements": 6}), None):
        refused = Member(shared.client(), run, "u").ask_to_join(frozen=frozen)
        detail = problem(refused, "model-mismatch")["detail"]
        assert "frozen parameters" in detail
        assert "without --param-dtype bf16" in detail, "rounded, they are others"
        assert ("none" in detail) == (frozen is None)


def test_a_worker_that_does_not_say_what_is_frozen_joins_as_ever(shared: InThread, run: str) -> None:
    """A client, or a first worker, from before this was told: nothing is compared."""
    shared.create_run(spec_toml(run))
    request = JoinRequest(tensors=TENSORS, data=DATA).model_dump(mode="json")
    assert "frozen" not in request
    for name, more in (("w", {}), ("v", {}), ("u", {"frozen": FROZEN.model_dump()})):
        member = Member(shared.client(), run, name)
        assert member.http.put(member.path(), json=request | more).status_code == 200
    assert info(shared, run)["frozen"] is None


def test_another_tokenizer_is_refused_by_name_and_another_name_is_not(shared: InThread, run: str) -> None:
    """The digest of the set differs as well; but it would not say why."""
    shared.create_run(spec_toml(run))
    first = DATA.model_copy(update={"tokenizer": "gpt2", "tokenizer_digest": "12" * 32})
    Member(shared.client(), run, "w", data=first).join(shared.admin_token)
    for name, update in (
        ("v", {"digest": "cd" * 32, "tokenizer": "llama", "tokenizer_digest": "34" * 32}),
        ("u", {"digest": "cd" * 32, "tokenizer": None, "tokenizer_digest": None}),
    ):
        refused = Member(shared.client(), run, name, data=first.model_copy(update=update)).ask_to_join()
        detail = problem(refused, "data-mismatch")["detail"]
        assert f"the run's by gpt2 (BLAKE3 {'12' * 32})" in detail
        assert f"by the tokenizer llama (BLAKE3 {'34' * 32})" in detail or (name == "u" and "tokenizer bytes" in detail)
    renamed = first.model_copy(update={"tokenizer": "/models/gpt2"})
    Member(shared.client(), run, "t", data=renamed).join(shared.admin_token)


def test_a_model_that_cannot_be_cut_is_refused_and_does_not_fix_the_run(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    refused = Member(shared.client(), run, "v", tensors=[TENSORS[0], TENSORS[0]]).ask_to_join()
    assert "'a' is listed twice" in problem(refused, "model-mismatch")["detail"]
    assert info(shared, run)["fragments"] is None
    enlist(shared, run, "w")


# --- the lease ----------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_lost_its_token_ends_and_its_units_go_to_others(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    silent, other = crew(shared, run, ["a", "b"], min_workers=2, members=MINUTE)
    silent.assignment(0)
    other.assignment(0)
    units = silent.assignment(0).units
    clock.advance(50)
    assert heartbeat(other) == 200
    clock.advance(11)
    shared.coordinator.tick()
    problem(silent.http.put(silent.path("/lease"), json={}), "unauthorized")
    assert silent.http.get(f"/v1/runs/{run}").status_code == 401
    assert info(shared, run, "/workers/a")["state"] == "lost"
    assert [event["data"]["worker"] for event in events(shared, run, "lost")] == ["a"]
    assert units_of(shared, run, "free") == [tuple(each) for each in units]
    third = recovered(enlist(shared, run, "c"))
    assert third.assignment(0).units == units
    assert units_of(shared, run, "free") == []


@pytest.mark.parametrize(
    ("call", "slug"),
    [
        pytest.param(lambda live: leases.renew(live, "w", Metrics()), "unauthorized", id="heartbeat"),
        # A worker that gives its lease up in order to join again joins then, too.
        pytest.param(lambda live: leases.leave(live, "w", LeaveRequest(), None), "unauthorized", id="goodbye"),
        pytest.param(lambda live: leases.leave(live, "w", LeaveRequest(), Actor()), "not-found", id="eviction"),
    ],
)
def test_what_was_on_its_way_when_the_lease_ended_does_not_revive_it(
    shared: InThread, run: str, clock: SettableClock, call: Callable[[LiveRun], object], slug: str
) -> None:
    """Calls as a handler makes them, which has checked the token before."""
    crew(shared, run, ["w"], members=MINUTE)
    clock.advance(61)
    shared.coordinator.tick()
    live = shared.live(run)
    with pytest.raises(Problem) as refused:
        call(live)
    assert refused.value.slug == slug
    assert live.members.live() == set()


@pytest.mark.usefixtures("endless_polls")
def test_a_long_poll_ends_in_401_when_the_lease_ends_meanwhile(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    (member,) = crew(shared, run, ["w"], min_workers=2, members=MINUTE)
    live, replies = shared.live(run), []
    with live.lock:  # so the lease ends before the poll's first look, wherever the request is now
        poll = threading.Thread(
            target=lambda: replies.append(
                member.http.put(member.path("/assignment"), json={"state_round": 0}, headers={"Prefer": "wait=9999"})
            )
        )
        poll.start()
        clock.advance(61)
        leases.expire(live)
    poll.join(PATIENCE_S)
    problem(replies[0], "unauthorized")
    assert live.members.ready == set()


# --- leaving ------------------------------------------------------------------------------------------------------


def test_a_worker_that_leaves_gives_its_units_back_and_its_last_state_is_shown(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"])
    units = member.assignment(0).units
    reply = member.http.request(
        "DELETE", member.path(), json={"state_round": 0, "state_digest": "12" * 32, "metrics": {"upload_bytes": 7}}
    )
    assert reply.status_code == 204
    shown = info(shared, run, "/workers/w")
    assert (shown["state"], shown["state_round"], shown["state_digest"]) == ("left", 0, "12" * 32)
    assert shown["metrics"]["upload_bytes"] == 7
    assert units_of(shared, run, "free") == [tuple(each) for each in units]
    assert heartbeat(member) == 401
    assert events(shared, run, "left")


# --- assignments --------------------------------------------------------------------------------------------------


def test_units_are_assigned_in_worker_id_order_whoever_asks_first(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["w2", "w0", "w1"], min_workers=3)
    ready(members, 0)
    units = {member.name: member.assignment(0).units for member in members}
    assert units == {"w0": [[0, 5]], "w1": [[5, 10]], "w2": [[10, 15]]}
    assert [member.assignment(0).units for member in members] == list(units.values()), "asking again changes it"
    assert {member.name for member in members if member.assignment(0).evaluate} == {"w0"}


def test_a_joiner_in_the_middle_of_a_round_takes_part_in_it(shared: InThread, run: str) -> None:
    first, second = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    ready([first, second], 0)
    first.take_part(0)
    joiner = enlist(shared, run, "c")
    assert joiner.assignment(None).action == "recover"
    recovered(joiner)
    assert joiner.take_part(0).units == [[10, 15]]
    second.take_part(0)
    assert info(shared, run, "/rounds/0")["fragments"][0]["contributors"] == ["a", "b", "c"]
    assert events(shared, run, "entered")[0]["data"]["worker"] == "c"


def test_a_joiner_that_is_not_ready_does_not_stall_the_others(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b"], rounds=2, min_workers=2)
    enlist(shared, run, "c")  # it has a lease, and recovers
    play_round(members, 0)
    assert info(shared, run)["round"] == 1


def test_a_run_waits_for_min_workers_that_are_ready(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"], min_workers=2)
    assert a.assignment(0).action == "wait"
    b = enlist(shared, run, "b")
    assert a.assignment(0).action == "wait", "b is there, but holds no state yet"
    recovered(b)
    assert b.assignment(0).action == "train"
    assert a.assignment(0).action == "train"


@pytest.mark.slow
def test_an_open_round_waits_when_too_few_are_left_and_goes_on_with_a_newcomer(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    ready([a, b], 0)
    a.take_part(0)
    b.http.delete(b.path())
    clock.advance(5)
    shared.coordinator.tick()
    reason = info(shared, run, "/rounds/current")["reason"]
    assert reason == "1 of at least 2 workers have contributed; waiting for more workers to join"
    c = recovered(enlist(shared, run, "c"))
    assert c.take_part(0).units == [[5, 10]], "the units that b gave back"
    assert a.delta(0, 0).status_code == 200
    a.step(0)


@pytest.mark.slow
def test_two_members_that_are_told_a_round_hear_of_its_end_by_the_same_state(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    play_rounds(shared, members, range(1))
    assert [member.assignment(1).action for member in members] == ["finish", "finish"]
    assert {member.name for member in members if member.assignment(1).evaluate} == {"a"}
    assert members[0].assignment(0).action == "recover"
    evaluated = members[0].http.put(
        f"/v1/runs/{run}/rounds/1/evaluation", json={"loss": 1.25, "tokens": 10, "bytes": 40}
    )
    assert (evaluated.status_code, evaluated.json()) == (200, {"without": []})
    assert info(shared, run)["held_out_loss"] == 1.25
    assert info(shared, run)["held_out_bits_per_byte"] == pytest.approx(1.25 / math.log(2) * 10 / 40)
    assert not any(member.assignment(1).evaluate for member in members)
    problem(Member(shared.client(), run, "c").ask_to_join(), "run-ended")


def test_a_worker_that_left_with_another_final_state_is_recorded_as_diverged(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    play_rounds(shared, [a, b], range(1))
    final = info(shared, run)["state_digest"]
    a.http.request("DELETE", a.path(), json={"state_round": 1, "state_digest": final})
    assert events(shared, run, "diverged") == []
    b.http.request("DELETE", b.path(), json={"state_round": 1, "state_digest": "12" * 32})
    assert [event["data"]["worker"] for event in events(shared, run, "diverged")] == ["b"]


# --- a restart ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_a_restart_every_lease_has_a_full_new_term(tmp_path: Path, clock: SettableClock) -> None:
    with coordinator_thread(tmp_path / "data", clock=clock) as running:
        (member,) = crew(running, "r", ["w"], members=MINUTE)
        clock.advance(59)
        running.coordinator.tick()
        port = int(running.url.rsplit(":", 1)[1])
    clock.advance(100)
    with coordinator_thread(tmp_path / "data", port=port, clock=clock) as running:
        running.coordinator.tick()
        assert running.live("r").members.remaining_s("w", clock()) == 60
        assert heartbeat(member) == 200
        play_round([member], 0)
        clock.advance(61)
        running.coordinator.tick()
        assert heartbeat(member) == 401
        with running.coordinator.database.read() as session:
            assert session.scalars(select(WorkerRow)).one().token_hash is None
