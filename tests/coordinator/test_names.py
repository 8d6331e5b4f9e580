"""A worker's name belongs to the token that joined with it first; a token is for so many names."""

from typing import Any

import httpx
import pytest

from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member, spec_toml
from protocol.messages import Scope
from tests.coordinator.crew import crew, info, problem, set_state

MINUTE = "lease_s = 60"


def join(running: InThread, run: str, name: str, token: str) -> httpx.Response:
    return Member(running.client(), run, name).ask_to_join(token)


def lose_all(shared: InThread, clock: SettableClock) -> None:
    clock.advance(61)
    shared.coordinator.tick()


@pytest.mark.covers("reliability:owned-names", "security:lapsed-name")
def test_a_lapsed_name_is_for_its_own_token_alone(shared: InThread, run: str, clock: SettableClock) -> None:
    """Another token once took it, and the honest worker was refused for good."""
    shared.create_run(spec_toml(run, members=MINUTE))
    own, other = (shared.token(Scope.WORKER, names=1) for _ in range(2))
    assert join(shared, run, "w", own).status_code == 200
    lose_all(shared, clock)
    for token in (other, shared.admin_token):
        detail = problem(join(shared, run, "w", token), "worker-name-owned")["detail"]
        assert f"outerstep run member {run} w release" in detail
    again = join(shared, run, "w", own)
    assert again.json()["epoch"] == 2


@pytest.mark.covers("security:stolen-member-token")
def test_the_thief_of_a_member_token_has_no_name_by_it(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"])
    with shared.client(shared.token(Scope.WORKER)) as http:
        stolen = Member(http, run, "w").ask_to_join(previous=member.joined.member_token)
    problem(stolen, "worker-name-owned")
    assert member.http.put(member.path("/lease"), json={}).status_code == 200


def test_a_released_name_is_the_next_ones(shared: InThread, run: str, clock: SettableClock) -> None:
    shared.create_run(spec_toml(run, members=MINUTE))
    own, other = (shared.token(Scope.WORKER, names=1) for _ in range(2))
    join(shared, run, "w", own).raise_for_status()
    assert info(shared, run, "/workers/w")["token"]
    assert set_state(shared, f"{run}/workers/w", "released")["token"] is None
    problem(join(shared, run, "w", other), "worker-name-taken")  # it is alive
    lose_all(shared, clock)
    assert join(shared, run, "w", other).status_code == 200
    problem(join(shared, run, "w", own), "worker-name-owned")
    with shared.client() as admin:
        problem(admin.patch(f"/v1/runs/{run}/workers/ghost", json={"state": "released"}), "not-found")


def test_the_name_of_a_revoked_token_is_not_free(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    with shared.client() as admin:
        made = admin.post("/v1/tokens", json={"scope": "worker"}).json()
        join(shared, run, "w", made["token"]).raise_for_status()
        assert admin.delete(f"/v1/tokens/{made['id']}").status_code == 204
    other = shared.token(Scope.WORKER, names=1)
    problem(join(shared, run, "w", other), "worker-name-owned")
    set_state(shared, f"{run}/workers/w", "released")
    assert join(shared, run, "w", other).status_code == 200


@pytest.mark.covers("security:many-names-one-token")
def test_a_token_is_for_so_many_names_over_all_runs(shared: InThread, run: str) -> None:
    runs = [f"{run}-a", f"{run}-b"]
    for each in runs:
        shared.create_run(spec_toml(each))
    with shared.client() as admin:
        one = admin.post("/v1/tokens", json={"scope": "worker"}).json()
    assert one["names"] == 1
    two = shared.token(Scope.WORKER, names=2)
    for each in runs:
        assert join(shared, each, "w", one["token"]).status_code == 200, "the same name in another run is no other name"
    detail = problem(join(shared, runs[0], "v", one["token"]), "forbidden")["detail"]
    assert "for 1 worker name" in detail
    assert "--names N" in detail
    assert "--scope join" in detail
    assert [worker["name"] for worker in info(shared, runs[0], "/workers")["items"]] == ["w"]
    assert [join(shared, each, name, two).status_code for each, name in zip(runs, "xy", strict=True)] == [200, 200]
    problem(join(shared, runs[0], "z", two), "forbidden")
    set_state(shared, f"{runs[0]}/workers/x", "released")
    assert join(shared, runs[0], "z", two).status_code == 200, "a name that was released does not count"


def test_names_are_kept_over_a_restart(tmp_path: Any) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        running.create_run(spec_toml("r"))
        own, other = (running.token(Scope.WORKER, names=1) for _ in range(2))
        join(running, "r", "w", own).raise_for_status()
    with coordinator_thread(tmp_path / "data") as running:
        problem(join(running, "r", "w", other), "worker-name-owned")
