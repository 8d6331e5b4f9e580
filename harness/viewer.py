"""One who has the dashboard of a run open: a stream of events, and what the page asks for whenever one comes."""

import asyncio
import json
import math
import re
import time
from contextlib import suppress

from harness.connection import Connection

# As in coordinator/dashboard/page/run_model.js.
NOT_SOONER_S = 1.5
IDLE_S = 5.0
WOKEN_AGE_S = 1
IDLE_AGE_S = 4
PAGE = 1000
_NEXT = re.compile(rb'"next":"([^"]*)"}$')
EPOCHS_EVERY_S = 15.0


class Viewer:
    """A page that shows a run, from event `after` on. `events`: the numbers of those that its stream has brought;
    `seconds`: how long each look at the coordinator took, from the first request to the last answer."""

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

    async def look(self, offset: float) -> None:
        """Look at the run as it goes, from `offset` seconds on, until this is cancelled."""
        await asyncio.sleep(offset)
        shown_until = 0.0
        while True:
            began = time.perf_counter()
            age_s = IDLE_AGE_S if self._heard_at <= shown_until else WOKEN_AGE_S
            await self._look(began, age_s)
            self.seconds.append(time.perf_counter() - began)
            shown_until = max(shown_until, began - age_s)
            await asyncio.sleep(NOT_SOONER_S)
            if self._heard_at <= shown_until:
                self._woken.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), IDLE_S - NOT_SOONER_S)

    async def _look(self, now: float, age_s: int) -> None:
        run = json.loads(await self._get("", age_s))
        newest = json.loads(await self._get("/rounds?limit=3", age_s))["items"]
        if newest and newest[0]["state"] != "published":
            await self._get(f"/rounds/{newest[0]['round']}", age_s)
        if now >= self._workers_due:
            listing, old = f"/workers?limit={PAGE}", math.ceil(self._workers_every_s / 5)
            page = await self._get(listing, old)
            while after := _NEXT.search(page):  # not parsed: that would keep the others of this process waiting
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
