"""Clients for crowds: a hand-written HTTP/1.1 connection, as an HTTP library would cost more than the coordinator; and
a viewer of a run's dashboard.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress

# As in coordinator/dashboard/page/run_model.js.
MIN_PAUSE_S = 1.5
IDLE_S = 5.0
WOKEN_AGE_S = 1
IDLE_AGE_S = 4
PAGE = 1000
_NEXT = re.compile(rb'"next":"([^"]*)"}$')
EPOCHS_EVERY_S = 15.0


class Connection:
    """One keep-alive connection to a coordinator on this machine."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()

    async def ask(self, method: str, path: str, body: bytes = b"", *headers: str) -> tuple[int, bytes, float]:
        """Send a request; return its status, its body and its duration in seconds."""
        asked = time.perf_counter()
        reader = await self._send(method, path, body, *headers)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        content = await reader.readexactly(int(length[1])) if length else b""
        return int(head[9:12]), content, time.perf_counter() - asked

    async def lines(self, path: str, *headers: str) -> AsyncIterator[bytes]:
        """Yield the lines of an endless response, including its chunk headers. Raises RuntimeError unless the status is
        200."""
        reader = await self._send("GET", path, b"", *headers)
        head = await reader.readuntil(b"\r\n\r\n")
        if head[9:12] != b"200":
            raise RuntimeError(f"{path}: {head.decode()}")
        while line := await reader.readline():
            yield line

    async def _send(self, method: str, path: str, body: bytes, *headers: str) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: coordinator",
            f"Authorization: Bearer {self._token}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *headers,
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return reader


class Viewer:
    """A client that sends the requests of a dashboard page, from event `after` on. `events`: the numbers of the events
    from its stream; `seconds`: the duration of each refresh, from the first request to the last response."""

    def __init__(self, port: int, token: str, run: str, after: int) -> None:
        self._stream, self._asking = Connection(port, token), Connection(port, token)
        self._path = f"/v1/runs/{run}"
        self._after = after
        self._woken = asyncio.Event()
        self._rounds_known = 0
        self._workers_due = self._epochs_due = 0.0
        self._workers_every_s = IDLE_S
        self._heard_at = time.perf_counter()
        self.events: list[int] = []
        self.seconds: list[float] = []
        self.requests = 0

    async def listen(self) -> None:
        """Follow the stream until this is cancelled."""
        headers = ("Accept: text/event-stream", f"Last-Event-ID: {self._after}")
        async for line in self._stream.lines(f"{self._path}/events", *headers):
            if line.startswith(b"id: "):
                self.events.append(int(line[4:]))
                self._heard_at = time.perf_counter()
                self._woken.set()

    async def refresh_until_cancelled(self, offset: float) -> None:
        """Refresh the run like the page, starting after `offset` seconds, until this is cancelled."""
        await asyncio.sleep(offset)
        shown_until = 0.0
        while True:
            began = time.perf_counter()
            age_s = IDLE_AGE_S if self._heard_at <= shown_until else WOKEN_AGE_S
            await self._refresh(began, age_s)
            self.seconds.append(time.perf_counter() - began)
            shown_until = max(shown_until, began - age_s)
            await asyncio.sleep(MIN_PAUSE_S)
            if self._heard_at <= shown_until:
                self._woken.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), IDLE_S - MIN_PAUSE_S)

    async def _refresh(self, now: float, age_s: int) -> None:
        run = json.loads(await self._get("", age_s))
        newest = json.loads(await self._get("/rounds?limit=3", age_s))["items"]
        if newest and newest[0]["state"] != "published":
            await self._get(f"/rounds/{newest[0]['round']}", age_s)
        if now >= self._workers_due:
            listing, old = f"/workers?limit={PAGE}", math.ceil(self._workers_every_s / 5)
            page = await self._get(listing, old)
            while after := _NEXT.search(page):  # not parsed, which would delay the other clients of this process
                page = await self._get(f"{listing}&after={after[1].decode()}", old)
            self._workers_every_s = IDLE_S * (1 + run["live_workers"] / 100)
            self._workers_due = now + self._workers_every_s
        for number in range(self._rounds_known, run["round"]):
            await self._get(f"/rounds/{number}", age_s)
        self._rounds_known = run["round"]
        if now >= self._epochs_due:
            self._epochs_due = now + EPOCHS_EVERY_S
            await self._get("/units?limit=100", age_s)

    async def _get(self, path: str, age_s: int) -> bytes:
        self.requests += 1
        headers = f"Cache-Control: max-age={age_s}"
        status, body, _ = await self._asking.ask("GET", self._path + path, b"", headers)
        if status != 200:
            raise RuntimeError(f"{path}: {body.decode()}")
        return body
