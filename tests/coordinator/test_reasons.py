"""What the coordinator says it waits for is true in every state of a run, wherever it says it."""

from harness.coordinator import InThread, SettableClock
from harness.member import Member
from tests.coordinator.crew import crew, info, play_round, problem, ready, set_state


def heartbeat(member: Member) -> tuple[str, str]:
    reply = member.http.put(member.path("/lease"), json={}).raise_for_status().json()
    return reply["directive"], reply["reason"]


def why_not(shared: InThread, run: str, round_: int) -> str:
    """What a reader is told who asks for the delta of a round that is not open."""
    with shared.client() as reader:
        detail = problem(reader.get(f"/v1/runs/{run}/rounds/{round_}/fragments/0/delta"), "not-published")["detail"]
    return str(detail).removeprefix(f"round {round_} is not open: ")


def test_while_a_round_waits_for_workers_and_while_it_is_open(shared: InThread, run: str) -> None:
    """Of round 1 it was said that round 0 waits for workers, while that was open."""
    a, b = members = crew(shared, run, ["a", "b"], rounds=3, min_workers=2)
    a.assignment(0)
    waits = "round 0 waits for workers: 1 of at least 2 are ready"
    assert info(shared, run)["reason"] == heartbeat(a)[1] == why_not(shared, run, 1) == a.assignment(0).reason == waits
    ahead = b.assignment(0).model_copy(update={"round": 1})
    assert heartbeat(a) == ("continue", "round 0 is open")
    assert why_not(shared, run, 1) == "round 0 is open"
    refused = problem(a.contribute(ahead, 0, a.pseudo_gradients(1)[0]), "round-not-open")
    assert refused["detail"] == "round 1 is not open: round 0 is open"
    play_round(members, 0)


def test_once_the_run_is_stopped_nothing_is_open_or_waited_for(shared: InThread, run: str) -> None:
    """The lease still said that round 0 is open, and the round's record when it would close."""
    members = crew(shared, run, ["a", "b", "c", "d"], rounds=2, members="lease_s = 100\nround_max_s = 60")
    ready(members, 0)
    a = members[0]
    a.take_part(0)
    assert info(shared, run, "/rounds/0")["fragments"][0]["closes_in_s"] == 60
    set_state(shared, run, "stopped")
    assert heartbeat(a) == ("stop", "the run is stopped")
    assert info(shared, run)["reason"] == "the run is stopped after 0 of 2 rounds"
    record = info(shared, run, "/rounds/0")
    assert record["reason"] == record["fragments"][0]["reason"] == "given up: the run was stopped"
    assert record["fragments"][0]["closes_in_s"] is None


def test_a_silent_worker_is_the_reason_until_it_is_heard_of_again(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    """An open round said that it waits for the worker, as if that were training."""
    a, b = crew(shared, run, ["a", "b"], rounds=2, min_workers=2, members="lease_s = 60")
    ready([a, b], 0)
    a.take_part(0)
    for round_ in (0, 1):  # the open one waits for b; then the next one, for b to be ready
        for member in (a, b):
            heartbeat(member)
        if round_:
            b.take_part(0)
            a.step(0)
            shared.await_state(run, 1)
            a.assignment(1)
        assert info(shared, run)["held_up_by"] is None
        clock.advance(40)
        heartbeat(a)
        shared.live(run).settle()
        shown = info(shared, run)
        assert shown["held_up_by"] == "worker-silent"
        assert "b is silent: last heard 40 s ago, dropped in 20 s" in shown["reason"]
        heartbeat(b)
        shared.live(run).settle()
        assert info(shared, run)["held_up_by"] is None
