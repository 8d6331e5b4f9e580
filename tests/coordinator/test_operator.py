"""What the operator does to a worker: evict, ban, readmit."""

import httpx

from harness.coordinator import InThread
from harness.member import Member
from tests.coordinator.crew import GRACE_OF_A_SECOND, crew, events, info, problem, ready, set_state


def change(running: InThread, member: Member, state: str) -> httpx.Response:
    with running.client() as admin:
        return admin.patch(member.path(), json={"state": state})


def join(running: InThread, member: Member, previous: str | None = None) -> httpx.Response:
    return Member(running.client(), member.run, member.name).ask_to_join(previous=previous)


def test_an_evicted_worker_is_not_waited_for_its_units_return_and_it_may_come_back(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=2, members=GRACE_OF_A_SECOND)
    ready([a, b], 0)
    units = a.assignment(0).units
    b.take_part(0)
    assert set_state(shared, f"{run}/workers/a", "evicted")["state"] == "evicted"
    b.step(0)
    problem(a.http.put(a.path("/lease"), json={}), "unauthorized")
    assert events(shared, run, "evicted")[0]["message"] == "a was evicted by the operator"
    assert b.assignment(1).units == units, "they went back to the pool"
    assert join(shared, a).status_code == 200


def test_a_banned_worker_may_not_come_back_until_it_is_readmitted(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"])
    assert set_state(shared, f"{run}/workers/a", "banned")["state"] == "banned"
    for previous in (None, a.joined.member_token):
        assert "banned a from the run" in problem(join(shared, a, previous), "banned")["detail"]
    assert "a" not in shared.live(run).members
    assert join(shared, Member(b.http, run, "c")).status_code == 200
    set_state(shared, f"{run}/workers/a", "banned")  # again: nothing changes
    assert len(events(shared, run, "banned")) == 1
    assert set_state(shared, f"{run}/workers/a", "readmitted")["state"] == "evicted"
    set_state(shared, f"{run}/workers/a", "readmitted")
    assert len(events(shared, run, "readmitted")) == 1
    assert join(shared, a).status_code == 200
    assert info(shared, run, "/workers/a")["state"] == "live"


def test_who_has_left_can_be_banned_but_not_evicted(shared: InThread, run: str) -> None:
    a, _ = crew(shared, run, ["a", "b"])
    a.http.delete(a.path()).raise_for_status()
    problem(change(shared, a, "evicted"), "not-found")
    assert set_state(shared, f"{run}/workers/a", "banned")["state"] == "banned"
    problem(join(shared, a), "banned")
    problem(change(shared, Member(a.http, run, "ghost"), "banned"), "not-found")
