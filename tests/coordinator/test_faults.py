"""Faults between two steps, and two requests at once: what was kept stays kept, and trying again succeeds.

The database is made to fail at a chosen statement by a trigger, as it fails on a full disk.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from coordinator.run.live_run import LiveRun
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member, spec_toml
from harness.stores import disturbed, names, read
from protocol.digest import digest
from tests.coordinator.crew import (
    GRACE_OF_A_SECOND,
    assigned,
    crew,
    enlist,
    events,
    info,
    play_one_round_of_two_without_deltas,
    play_round,
    problem,
    refusing,
    set_state,
)
from tests.support.threads import at_once
from tests.support.waiting import PATIENCE_S, wait_until


def put_at_once(member: Member, path: str, bodies: list[bytes]) -> list[httpx.Response]:
    return at_once(len(bodies), lambda number: member.put(path, bodies[number]))


@contextmanager
def committed_together(live: LiveRun, count: int) -> Iterator[None]:
    """The next `count` contributions, which must come at once, are committed with one transaction."""
    together = threading.Barrier(count + 1, timeout=PATIENCE_S)

    def durable(_: str) -> None:
        together.wait()  # all are durable
        together.wait()  # and the lock is taken

    def hold_back() -> None:
        together.wait()
        with live.lock:
            together.wait()
            wait_until(lambda: len(live.arrivals) == count)

    with disturbed(live, "contributions", after=durable), ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold_back)
        yield
        held.result()


@pytest.mark.slow
def test_a_contribution_that_arrives_several_times_at_once_is_accepted_once_and_kept(
    shared: InThread, run: str
) -> None:
    (member,) = crew(shared, run, ["w"], rounds=6)
    for round_ in range(6):
        assignment = member.assignment(round_)
        for p, values in enumerate(member.pseudo_gradients(round_)):
            body = member.payload(assignment, p, values)
            replies = put_at_once(member, member.contribution_path(round_, p), [body] * 4)
            assert sorted(reply.status_code for reply in replies) == [200, 200, 200, 201]
        member.step(round_)
    assert events(shared, run, "fault") == []


@pytest.mark.slow
def test_a_contribution_that_waits_several_times_for_one_transaction_is_accepted_once(
    shared: InThread, run: str
) -> None:
    (member,) = crew(shared, run, ["w"], rounds=1)
    assignment = member.assignment(0)
    for p, values in enumerate(member.pseudo_gradients(0)):
        body = member.payload(assignment, p, values)
        with committed_together(shared.live(run), 4):
            replies = put_at_once(member, member.contribution_path(0, p), [body] * 4)
        assert sorted(reply.status_code for reply in replies) == [200, 200, 200, 201]
    member.step(0)
    assert info(shared, run, "/workers/w")["contributions"] == 1


def test_of_two_contributions_that_wait_for_one_transaction_one_stands(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"], rounds=1)
    assignment = member.assignment(0)
    values = member.pseudo_gradients(0)[0]
    bodies = [member.payload(assignment, 0, values), member.payload(assignment, 0, 2 * values)]
    with committed_together(shared.live(run), 2):
        replies = put_at_once(member, member.contribution_path(0, 0), bodies)
    accepted, refused = sorted(replies, key=lambda reply: reply.status_code)
    assert accepted.status_code == 201
    assert accepted.json()["digest"] in problem(refused, "contribution-conflict")["detail"]
    (name,) = names(shared.live(run), "contributions", 0)
    assert digest(read(shared.live(run).blobs, name)).hex() == accepted.json()["digest"]


def test_a_contribution_that_cannot_be_recorded_leaves_no_file_and_may_be_sent_again(
    shared: InThread, run: str
) -> None:
    (member,) = crew(shared, run, ["w"], rounds=1)
    assignment = member.assignment(0)
    with refusing(shared, "INSERT ON contributions"):
        problem(member.contribute(assignment, 0, member.pseudo_gradients(0)[0]), "internal")
    assert names(shared.live(run), "contributions") == []
    play_round([member], 0)


def test_a_contribution_that_was_recorded_keeps_its_file_though_the_round_cannot_be_closed(
    shared: InThread, run: str
) -> None:
    (member,) = crew(shared, run, ["w"], rounds=1)
    assignment = member.assignment(0)
    with refusing(shared, "UPDATE ON fragments"):
        for p, values in enumerate(member.pseudo_gradients(0)):
            problem(member.contribute(assignment, p, values), "internal")
        assert len(names(shared.live(run), "contributions", 0)) == 2
        assert member.contribute(assignment, 0, member.pseudo_gradients(0)[0]).status_code == 200
    shared.coordinator.tick()
    member.step(0)


def test_the_first_worker_does_not_fix_the_model_when_its_joining_fails(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    with refusing(shared, "INSERT ON workers"), shared.client() as client:
        broken = Member(client, run, "w")
        request = {"tensors": [{"name": "other", "shape": [7]}]}
        problem(client.put(broken.path(), json=request), "internal")
    assert info(shared, run)["fragments"] is None
    enlist(shared, run, "w")
    assert info(shared, run)["elements"] == 977


def test_a_seeding_that_failed_at_the_very_end_is_finished_by_sending_the_fragment_again(
    shared: InThread, run: str
) -> None:
    shared.create_run(spec_toml(run))
    member = enlist(shared, run, "w")
    assert member.assignment(None).action == "seed"
    assert member.seed_fragment(0, 0.5).status_code == 201
    with refusing(shared, "INSERT ON checkpoints"):
        problem(member.seed_fragment(1, 0.5), "internal")
        assert member.assignment(None).action == "seed"
    assert member.seed_fragment(1, 0.5).status_code == 200
    play_round([member], 0)


@pytest.mark.slow
def test_a_checkpoint_that_could_not_be_completed_is_completed_later(tmp_path: Path) -> None:
    clock = SettableClock()
    with coordinator_thread(tmp_path / "data", clock=clock) as running:
        (member,) = crew(running, "r", ["w"], rounds=1)
        with refusing(running, "INSERT ON checkpoints"):
            play_round([member], 0)
            live = running.live("r")

            def has_given_up() -> bool:  # of two fragments that are stepped at once both fail
                with live.lock:
                    jobs = live.outer.jobs
                    return any(job.retry_at > 0 for job in jobs) and not any(job.running for job in jobs)

            wait_until(has_given_up)
            assert events(running, "r", "fault")
        assert info(running, "r", "/checkpoints/latest")["round"] == 0
        clock.advance(5)
        running.coordinator.tick()
        running.await_state("r", 1)
        assert info(running, "r", "/checkpoints/latest")["round"] == 1


def test_the_same_run_created_several_times_at_once_is_created_once(shared: InThread, run: str) -> None:
    replies = at_once(6, lambda _: shared.client().post("/v1/runs", content=spec_toml(run)))
    assert sorted(reply.status_code for reply in replies) == [200] * 5 + [201]


def test_a_run_whose_tick_fails_does_not_hold_up_the_others(shared: InThread, run: str, clock: SettableClock) -> None:
    crew(shared, run, ["silent"], members="lease_s = 1")
    members = a, b, c = crew(shared, run + "-other", ["a", "b", "c"], min_workers=2, members=GRACE_OF_A_SECOND)
    assigned(members, 0)
    a.take_part(0)
    b.take_part(0)
    with refusing(shared, "UPDATE ON workers"):  # so the silent one's lease cannot be ended
        clock.advance(2)
        shared.coordinator.tick()
        assert c.delta(0, 0).status_code == c.delta(0, 1).status_code == 200
        assert "silent" in shared.live(run).members
    shared.coordinator.tick()
    assert "silent" not in shared.live(run).members


def test_a_run_that_was_stopped_stays_so_though_its_last_delta_could_be_made_afterwards(tmp_path: Path) -> None:
    clock = SettableClock()
    with coordinator_thread(tmp_path / "data", clock=clock) as running:
        member, _, blocked = play_one_round_of_two_without_deltas(running)
        wait_until(lambda: len(events(running, "r", "fault")) == 2)
        set_state(running, "r", "stopped")
        blocked.unblock()
        clock.advance(5)
        running.coordinator.tick()
        wait_until(lambda: not any(job.running for job in running.live("r").outer.jobs))
        assert info(running, "r")["state"] == "stopped"
        problem(member.delta(0, 0), "run-ended")
