"""Line checks: random bytes down, any bytes up and away; more than 8 MiB are refused before they are read."""

import asyncio
import zlib
from collections.abc import Iterator

import pytest

from coordinator.api import server
from coordinator.http.uploads import CHUNK_BYTES
from harness.coordinator import InThread
from protocol.messages import LINE_CHECK_BYTES, Scope
from tests.coordinator.crew import problem

PATH = "/v1/line-check"


@pytest.mark.parametrize("count", [0, 1, (1 << 18) + 1, LINE_CHECK_BYTES])
def test_down_come_as_many_bytes_as_were_asked_for(shared: InThread, count: int) -> None:
    with shared.client(shared.token(Scope.WORKER)) as http:
        reply = http.get(PATH, params={"bytes": count})
        assert (reply.status_code, len(reply.content), reply.headers["content-length"]) == (200, count, str(count))
        assert reply.headers["cache-control"] == "private, no-store"
        if count > 1000:
            assert len(zlib.compress(reply.content)) >= count, "what lies between may compress it away"


@pytest.mark.parametrize("count", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_a_check_no_longer_counts_once_its_last_bytes_are_sent(count: int) -> None:
    """The next one was refused, to be repeated 5 s later, where the client was quicker than the coordinator."""
    parts: list[bytes] = []
    ended_at: list[int] = []

    async def read() -> None:
        async for part in server.random_bytes(count, lambda: ended_at.append(len(parts))):
            parts.append(part)

    asyncio.run(read())
    assert sum(map(len, parts)) == count
    assert ended_at == [len(parts) - 1]


def test_up_goes_a_body_of_which_nothing_is_left(shared: InThread) -> None:
    before = sorted(shared.data_dir.rglob("*"))
    with shared.client(shared.token(Scope.WORKER)) as http:
        assert http.post(PATH, content=bytes(LINE_CHECK_BYTES)).status_code == 204
        assert http.post(PATH).status_code == 204
    assert sorted(shared.data_dir.rglob("*")) == before


def test_more_is_refused(shared: InThread) -> None:
    def endless() -> Iterator[bytes]:  # of unknown length: refused while it arrives
        for _ in range(LINE_CHECK_BYTES // (1 << 16) + 1):
            yield bytes(1 << 16)

    with shared.client() as http:
        problem(http.get(PATH, params={"bytes": LINE_CHECK_BYTES + 1}), "invalid-message")
        problem(http.get(PATH, params={"bytes": -1}), "invalid-message")
        problem(http.post(PATH, content=bytes(LINE_CHECK_BYTES + 1)), "payload-too-large")
        problem(http.post(PATH, content=endless()), "payload-too-large")
