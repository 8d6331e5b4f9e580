"""What the operator does to a worker: evict, ban, readmit."""

import httpx

from harness.coordinator import InThread
from harness.member import DATA, Member
from tests.coordinator.crew import GRACE_OF_A_SECOND, crew, enlist, events, info, problem


def change(running: InThread, member: Member, state: str) -> httpx.Response:
    with running.client() as admin:
        return admin.patch(member.path(), json={"state": state})


def join(running: InThread, member: Member) -> httpx.Response:
    body = {"tensors": [each.model_dump() for each in member.tensors], "data": DATA.model_dump()}
    with running.client() as worker:
        return worker.put(member.path(), json=body)


def test_an_evicted_worker_is_not_waited_for_its_units_return_and_it_may_come_back(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=2, members=GRACE_OF_A_SECOND)
    for member in (a, b):
        member.assignment(0)
    units = a.assignment(0).units
    b.take_part(0)
    assert change(shared, a, "evicted").json()["state"] == "evicted"
    b.step(0)
    problem(a.http.put(a.path("/lease"), json={}), "unauthorized")
    assert events(shared, run, "evicted")[0]["message"] == "a was evicted by the operator"
    assert b.assignment(1).units == units, "they went back to the pool"
    assert join(shared, a).status_code == 200


def test_a_banned_worker_may_not_come_back_until_it_is_readmitted(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"])
    assert change(shared, a, "banned").json()["state"] == "banned"
    assert "banned a from the run" in problem(join(shared, a), "banned")["detail"]
    assert "a" not in shared.live(run).members
    assert join(shared, Member(b.http, run, "c")).status_code == 200
    assert change(shared, a, "banned").status_code == 200, "again changes nothing"
    assert len(events(shared, run, "banned")) == 1
    assert change(shared, a, "readmitted").json()["state"] == "evicted"
    assert change(shared, a, "readmitted").status_code == 200
    assert len(events(shared, run, "readmitted")) == 1
    assert join(shared, a).status_code == 200
    assert info(shared, run, "/workers/a")["state"] == "live"


def test_who_has_left_can_be_banned_but_not_evicted(shared: InThread, run: str) -> None:
    a, _ = crew(shared, run, ["a", "b"])
    a.http.delete(a.path()).raise_for_status()
    problem(change(shared, a, "evicted"), "not-found")
    assert change(shared, a, "banned").json()["state"] == "banned"
    problem(join(shared, a), "banned")
    problem(change(shared, Member(a.http, run, "ghost"), "banned"), "not-found")


def test_a_worker_that_is_banned_stays_so_after_a_restart_of_its_process(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"])
    change(shared, a, "banned")
    body = {"tensors": [each.model_dump() for each in a.tensors], "data": DATA.model_dump()}
    with shared.client() as worker:
        problem(worker.put(a.path(), json={**body, "previous": a.joined.member_token}), "banned")
    assert enlist(shared, run, "other").joined.worker == "other"
