"""Revoking, expiry, eviction and ban end all that there is by a token: leases, streams, long polls, uploads."""

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds import membership
from coordinator.run.waiters import ASSIGNMENTS, EVENTS
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.identity import Actor
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import DATA, TENSORS, Member, spec_toml
from protocol.digest import content_digest, digest
from protocol.messages import JoinRequest, Scope, TokenRequest
from tests.coordinator.crew import assigned, crew, events, info, problem, recovered
from tests.support.waiting import PATIENCE_S, wait_until


def made(running: InThread, **fields: Any) -> dict[str, Any]:
    with running.client() as admin:
        reply = admin.post("/v1/tokens", json=fields).raise_for_status()
        token: dict[str, Any] = reply.json()
        return token


def revoke(running: InThread, token: dict[str, Any]) -> None:
    running.client().delete(f"/v1/tokens/{token['id']}").raise_for_status()


def evict(running: InThread, member: Member, state: str) -> None:
    running.client().patch(member.path(), json={"state": state}).raise_for_status()


def joined(running: InThread, run: str, name: str, token: dict[str, Any]) -> Member:
    member = Member(running.client(), run, name)
    member.join(token["token"])
    return recovered(member)


def waits(running: InThread, run: str, topic: str) -> None:
    """Return once somebody waits for the topic."""
    wait_until(lambda: running.coordinator.waiters.has_waiters(run, topic))


@pytest.mark.covers("reliability:revoked-token", "security:revoked-token")
def test_revoking_a_token_ends_the_leases_of_its_members_at_once(shared: InThread, run: str) -> None:
    """They once went on contributing."""
    (other,) = crew(shared, run, ["a"], min_workers=2)
    token = made(shared, scope="worker", names=2)
    b, c = (joined(shared, run, name, token) for name in ("b", "c"))
    units = assigned([other, b, c], 0)[1].units
    revoke(shared, token)
    for member in (b, c):
        problem(member.http.put(member.path("/lease"), json={}), "unauthorized")
        problem(member.ask_to_join(token["token"]), "unauthorized")
        assert info(shared, run, f"/workers/{member.name}")["state"] == "evicted"
    assert [event["data"]["worker"] for event in events(shared, run, "evicted")] == ["b", "c"]
    assert "its token was revoked" in events(shared, run, "evicted")[0]["message"]
    assert shared.live(run).members.live() == {"a"}
    assert recovered(joined(shared, run, "d", made(shared, scope="worker"))).assignment(0).units == units
    assert other.http.put(other.path("/lease"), json={}).status_code == 200


def streamed(running: InThread, run: str, token: str, act: Any) -> list[dict[str, Any]]:
    """The events of a stream that ends by itself after `act`, which is called once the first event is there."""
    found: list[dict[str, Any]] = []
    headers = {"Accept": "text/event-stream"}
    with running.client(token) as http, http.stream("GET", f"/v1/runs/{run}/events", headers=headers) as reply:
        assert reply.headers["cache-control"] == "private, no-store"
        for line in reply.iter_lines():
            assert not line.startswith(":"), "the stream is still there, and says so by a ping"
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == 1:
                    waits(running, run, EVENTS)
                    act()
    return found


@pytest.mark.covers("reliability:revoked-token", "security:revoked-token")
def test_revoking_a_token_ends_its_streams(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    token = made(shared, scope="viewer")
    seen = streamed(shared, run, token["token"], lambda: revoke(shared, token))
    assert [event["kind"] for event in seen] == ["created"]


def test_rotating_a_token_ends_its_streams_and_its_old_secret_alone(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    token = made(shared, scope="worker")
    member = joined(shared, run, "w", token)
    answers: list[dict[str, Any]] = []

    def rotate() -> None:
        answers.append(shared.client().post(f"/v1/tokens/{token['id']}/secret").raise_for_status().json())

    streamed(shared, run, token["token"], rotate)
    (rotated,) = answers
    assert rotated["id"] == token["id"]
    assert rotated["token"] != token["token"]
    with shared.client(token["token"]) as before, shared.client(rotated["token"]) as after:
        problem(before.get("/v1/runs"), "unauthorized")
        assert after.get("/v1/runs").status_code == 200
    assert member.http.put(member.path("/lease"), json={}).status_code == 200
    again = Member(shared.client(), run, "w")
    again.join(rotated["token"], previous=member.joined.member_token)
    assert again.joined.epoch == 2, "the name is the token's as before"


@pytest.mark.parametrize("state", ["evicted", "banned"])
def test_a_member_that_is_sent_away_has_no_stream_any_more(shared: InThread, run: str, state: str) -> None:
    (member,) = crew(shared, run, ["w"])
    seen = streamed(shared, run, member.joined.member_token, lambda: evict(shared, member, state))
    assert state not in [event["kind"] for event in seen]


def test_revoking_a_token_ends_the_long_polls_of_its_members(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"], min_workers=3)
    token = made(shared, scope="worker")
    member = joined(shared, run, "b", token)
    with ThreadPoolExecutor(1) as others:
        member.http.headers["Prefer"] = "wait=60"
        reply = others.submit(member.http.put, member.path("/assignment"), json={"state_round": 0})
        waits(shared, run, ASSIGNMENTS)
        revoke(shared, token)
        problem(reply.result(PATIENCE_S), "unauthorized")


@pytest.mark.covers("reliability:revoked-token", "security:revoked-token")
def test_what_was_on_its_way_when_its_worker_was_sent_away_is_refused(shared: InThread, run: str) -> None:
    """With the first fragment the units were consumed, so those that came later were taken from whoever sent them."""
    a, b = crew(shared, run, ["a", "b"], min_workers=2)
    assignment, _ = assigned([a, b], 0)
    elements = a.joined.layout.elements
    first, second = (a.payload(assignment, p, np.ones(elements[p], np.float32)) for p in (0, 1))
    path = f"/v1/runs/{run}/rounds/0/fragments/{{}}/contributions/a"
    assert a.put(path.format(0), first).status_code == 201

    def slowly() -> Iterator[bytes]:
        yield second[:10]
        evict(shared, a, "banned")
        yield second[10:]

    headers = {"Content-Digest": content_digest(digest(second)), "Content-Length": str(len(second))}
    problem(a.http.put(path.format(1), content=slowly(), headers=headers), "unauthorized")
    assert info(shared, run, "/rounds/0")["fragments"][1]["contributors"] == []


@pytest.mark.in_sqlite
def test_what_a_kill_left_undone_of_a_revocation_is_done_at_the_start(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        running.create_run(spec_toml("r"))
        token = made(running, scope="worker")
        joined(running, "r", "w", token)
    with sqlite3.connect(tmp_path / "data" / "outerstep.db") as database:
        database.execute("DELETE FROM tokens WHERE id = ?", (token["id"],))
    with coordinator_thread(tmp_path / "data") as running:
        running.coordinator.tick()
        assert info(running, "r", "/workers/w")["state"] == "evicted"


def test_a_token_that_expires_ends_as_one_that_is_revoked(tmp_path: Path) -> None:
    now = SettableClock()
    service = Coordinator(Settings(data_dir=tmp_path), now=now)
    try:
        run, _ = service.create_run(spec_toml("r"), Actor())
        token = service.new_token(TokenRequest(scope=Scope.WORKER, expires_in_s=60), Actor())
        assert token.expires_at == now() + 60
        holder = service.identify(token.token)
        assert holder is not None
        request = JoinRequest(tensors=TENSORS, data=DATA)
        membership.join(run, "w", request, holder, Actor(), service.tokens.is_good)
        now.advance(59.9)
        service.tick()
        assert service.identify(token.token) == holder
        assert "w" in run.members
        now.advance(0.2)
        assert service.identify(token.token) is None
        service.tick()
        assert "w" not in run.members
        (listed,) = [each for each in service.tokens.listed(10, None) if each.id == token.id]
        assert listed.expires_at == token.expires_at, "it is shown until it is revoked"
    finally:
        service.close()
