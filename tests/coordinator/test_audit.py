"""The audit: every act with who did it, from where."""

from pathlib import Path
from typing import Any

import pytest

from harness.coordinator import InThread, Running, coordinator_thread
from harness.member import Member, spec_toml
from protocol.messages import Scope
from tests.coordinator.crew import pages, problem, refusing
from tests.support.waiting import wait_until

OWN = "ost_" + "a" * 43


def entries(running: Running, query: str = "limit=1000") -> list[dict[str, Any]]:
    """Oldest first."""
    found: list[dict[str, Any]] = running.client().get(f"/v1/audit?{query}").raise_for_status().json()["items"]
    return found[::-1]


@pytest.mark.slow
@pytest.mark.covers("security:event-flooding", "security:hostile-admin")
def test_every_act_is_told_with_who_did_it_and_from_where(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running, running.client() as admin:
        running.create_run(spec_toml("r"))
        operator = admin.post("/v1/tokens", json={"scope": "operator", "run": "r"}).json()
        join_token = admin.post("/v1/tokens", json={"scope": "join"}).json()
        with running.client(join_token["token"]) as box:
            own = box.post("/v1/runs/r/workers/w/token", json={"token": OWN}).raise_for_status().json()
        for _ in range(2):
            with running.client(OWN) as http:
                member = Member(http, "r", "w")
                member.join(OWN)
            with running.client(operator["token"]) as http:
                http.patch("/v1/runs/r/workers/w", json={"state": "evicted"}).raise_for_status()
        with running.client(operator["token"]) as http:
            for state in ("banned", "readmitted", "released"):
                http.patch("/v1/runs/r/workers/w", json={"state": state}).raise_for_status()
            http.patch("/v1/runs/r", json={"state": "stopped"}).raise_for_status()
        admin.post(f"/v1/tokens/{join_token['id']}/secret").raise_for_status()
        admin.delete(f"/v1/tokens/{join_token['id']}").raise_for_status()
        wait_until(lambda: admin.delete("/v1/runs/r").status_code == 204)  # 503 while a job works on its files
        (first,) = [token for token in admin.get("/v1/tokens").json()["items"] if token["note"].startswith("made at")]
        told = entries(running)
    by_admin, by_operator = first["id"], operator["id"]
    assert [(each["act"], each["token"], each["run"]) for each in told] == [
        ("token-created", None, None),
        ("run-created", by_admin, "r"),
        ("token-created", by_admin, "r"),
        ("token-created", by_admin, None),
        ("token-exchanged", join_token["id"], "r"),
        ("name-claimed", own["id"], "r"),
        ("worker-evicted", by_operator, "r"),
        ("worker-evicted", by_operator, "r"),
        ("worker-banned", by_operator, "r"),
        ("worker-readmitted", by_operator, "r"),
        ("worker-released", by_operator, "r"),
        ("run-changed", by_operator, "r"),
        ("token-rotated", by_admin, None),
        ("token-revoked", by_admin, None),
        ("run-removed", by_admin, "r"),
    ]
    assert [each["address"] for each in told] == [None] + ["127.0.0.1"] * 14
    assert all(each["at"] > 0 and each["message"] for each in told)
    assert not [secret for secret in (OWN, operator["token"], join_token["token"]) if secret in str(told)]


@pytest.mark.covers("security:misconfigured-proxy")
def test_a_proxy_on_this_machine_says_who_asks(shared: InThread) -> None:
    with shared.client() as admin:
        headers = {"X-Forwarded-For": "203.0.113.7"}
        admin.post("/v1/tokens", json={"scope": "viewer"}, headers=headers).raise_for_status()
    assert entries(shared, "limit=1")[0]["address"] == "203.0.113.7"


def test_entries_come_page_by_page(shared: InThread) -> None:
    for _ in range(5):
        shared.token(Scope.VIEWER)
    assert pages(shared, "/audit") == entries(shared)[::-1]


def test_what_failed_is_not_told(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    before = entries(shared)
    with shared.client() as admin:
        problem(admin.patch(f"/v1/runs/{run}/workers/ghost", json={"state": "banned"}), "not-found")
        with refusing(shared, "INSERT ON tokens"):
            assert admin.post("/v1/tokens", json={"scope": "viewer"}).status_code == 500
    assert entries(shared) == before
