"""How slowly a body may arrive."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi import Request

from coordinator.http.bodies import MinimumRate, chunks
from coordinator.settings import Settings
from harness.coordinator import InThread
from protocol.errors import Problem
from tests.support.waiting import PATIENCE_S


def test_the_network_may_be_interrupted_for_most_of_a_window() -> None:
    rate = MinimumRate(bytes_per_s=10, window_s=60, now=0)
    assert rate.arrived(300, 1)
    assert rate.arrived(299, 58)  # too few so far, and there is time left
    assert rate.arrived(1, 61)
    assert rate.arrived(10_000, 62)
    assert rate.arrived(1, 122)


def test_a_trickle_is_given_up_at_the_end_of_a_window() -> None:
    rate = MinimumRate(bytes_per_s=10, window_s=60, now=0)
    assert all(rate.arrived(5, second) for second in range(1, 60))
    assert not rate.arrived(5, 60)


def test_bytes_of_one_window_do_not_count_in_the_next() -> None:
    rate = MinimumRate(bytes_per_s=10, window_s=60, now=0)
    assert rate.arrived(1_000_000, 60)
    assert not rate.arrived(599, 120)


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
    with shared.client() as admin:
        assert admin.post("/v1/line-check", content=b"x").status_code == httpx.codes.NO_CONTENT
