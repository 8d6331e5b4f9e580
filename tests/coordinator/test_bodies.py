"""Bodies that break off, stop coming or trickle, straight into memory and through a file."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi import Request

from coordinator.http.bodies import MinimumRate, chunks
from coordinator.settings import Settings
from coordinator.store.payloads import MemoryBudget
from harness.coordinator import InThread
from harness.member import Member
from protocol.digest import content_digest, digest
from protocol.errors import Problem
from protocol.messages import Assignment
from tests.coordinator.crew import crew
from tests.support.waiting import PATIENCE_S, wait_until

ROOM_BYTES = 1 << 20


@pytest.fixture(params=[ROOM_BYTES, 0], ids=["in memory", "through a file"])
def memory(request: pytest.FixtureRequest, shared: InThread, monkeypatch: pytest.MonkeyPatch) -> MemoryBudget:
    memory = MemoryBudget(request.param)
    monkeypatch.setattr(shared.coordinator, "memory", memory)
    return memory


@contextmanager
def half_sent(running: InThread, member: Member, assignment: Assignment) -> Iterator[HTTPConnection]:
    """A connection over which half of the contribution to fragment 0 was sent."""
    body = member.payload(assignment, 0, member.pseudo_gradients(0)[0])
    with closing(HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)) as connection:
        connection.putrequest("PUT", member.contribution_path(0, 0))
        connection.putheader("Authorization", f"Bearer {member.joined.member_token}")
        connection.putheader("Content-Length", str(len(body)))
        connection.putheader("Content-Digest", content_digest(digest(body)))
        connection.endheaders(body[: len(body) // 2])
        yield connection


def test_a_body_that_breaks_off_leaves_nothing_behind(shared: InThread, run: str, memory: MemoryBudget) -> None:
    (member,) = crew(shared, run, ["a"], rounds=1)
    assignment = member.assignment(0)
    with half_sent(shared, member, assignment) as connection:
        if memory.contributions_bytes:
            wait_until(lambda: memory.take(memory.contributions_bytes) is None)
        connection.sock.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not list((shared.data_dir / "incoming").iterdir()))
        wait_until(lambda: memory.take(memory.contributions_bytes) is not None)
    member.contribute_all(assignment)


def test_a_body_that_stops_coming_is_given_up(
    shared: InThread, run: str, memory: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    (member,) = crew(shared, run, ["a"], rounds=1)
    assignment, settings = member.assignment(0), shared.coordinator.settings
    # Connections keep the settings that they have: so it is not one of their limits that ends this one.
    monkeypatch.setattr(shared.coordinator, "settings", settings.model_copy(update={"upload_idle_s": 0.1}))
    with half_sent(shared, member, assignment) as connection:
        assert connection.getresponse().status == 408
        wait_until(lambda: memory.take(memory.contributions_bytes) is not None)  # while the connection lasts
        wait_until(lambda: not list((shared.data_dir / "incoming").iterdir()))


# --- how slowly a body may arrive -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "accepted"),
    [
        # The network may be interrupted for most of a window: with too few bytes so far, there is time left.
        ([(300, 1), (299, 58), (1, 61), (10_000, 62), (1, 122)], True),
        # A trickle is given up at the end of a window.
        ([(5, second) for second in range(1, 60)], True),
        ([(5, second) for second in range(1, 61)], False),
        # Bytes of one window do not count in the next.
        ([(1_000_000, 60)], True),
        ([(1_000_000, 60), (599, 120)], False),
    ],
)
def test_a_body_arrives_at_the_minimum_rate_in_every_window(arrivals: list[tuple[int, int]], accepted: bool) -> None:
    """`arrivals`: bytes, and the second in which they come. All but the last are fast enough."""
    rate = MinimumRate(bytes_per_s=10, window_s=60, now=0)
    *before, last = [rate.arrived(count, second) for count, second in arrivals]
    assert all(before)
    assert last is accepted


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/v1/runs/r/workers/w"), ("POST", "/v1/runs"), ("POST", "/v1/line-check")]
)
def test_a_message_that_stops_coming_is_given_up(
    shared: InThread, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """Joins that were sent by half held memory for as long as their connections lasted."""
    monkeypatch.setattr(shared.coordinator.settings, "upload_idle_s", 0.1)
    with socket.create_connection(("127.0.0.1", shared.port), timeout=PATIENCE_S) as line:
        head = [f"{method} {path} HTTP/1.1", "Host: c", f"Authorization: Bearer {shared.admin_token}"]
        line.sendall("\r\n".join([*head, "Content-Type: application/json", "Content-Length: 9", "", '{"a"']).encode())
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


class Trickle:
    """A request whose body arrives in chunks, one every ten seconds of the event loop's clock."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    async def stream(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for number, size in enumerate(self._sizes, 1):
            loop.time = lambda at=now + 10 * number: at  # type: ignore[method-assign,misc]
            yield bytes(size)

    async def received(self, settings: Settings) -> int:
        sizes = [len(piece) async for piece in chunks(cast(Request, self), settings)]
        return sum(sizes)


@pytest.mark.covers("security:slow-bodies", "security:trickling-parts")
def test_a_body_that_hardly_moves_is_given_up(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, upload_idle_s=60, min_body_bytes_per_s=10)
    assert asyncio.run(Trickle(*[100] * 30).received(settings)) == 3000
    assert asyncio.run(Trickle(1, 1, 1, 1, 1, 600, 600).received(settings)) == 1205
    with pytest.raises(Problem, match="fewer than 10 bytes per second arrived for 60 s"):
        asyncio.run(Trickle(*[100] * 6, *[99] * 6).received(settings))


def test_without_a_minimum_rate_only_silence_counts(shared: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.coordinator.settings, "min_body_bytes_per_s", 0)
    assert shared.client().post("/v1/line-check", content=b"x").status_code == httpx.codes.NO_CONTENT
