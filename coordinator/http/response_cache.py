"""JSON responses that are read from the database on a few threads reserved for reading, and shared between clients.

However many and large these reads are, they use neither the event loop nor the threads that uploads need. If two
hundred people watch a run, they all ask for the same responses every few seconds. A client that accepts an older
response (`Cache-Control: max-age=5`, RFC 9111 section 5.2.1.1) may get one that was made for another client, with its
`Age`; other clients get a fresh one.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import anyio.to_thread
from fastapi import Request, Response
from pydantic import BaseModel

from coordinator.service import Coordinator
from protocol.messages import Event, Page

Value = TypeVar("Value")
MAX_AGE_S = 60
MAX_BYTES = 8 << 20  # of each cache
READ_BYTES = 4096  # assumed memory of a read, besides its value
EVENT_BYTES = 1024  # assumed memory of an event
_MAX_AGE = re.compile(r"(?i)(?:^|[\s,])max-age=(\d{1,9})(?:$|[\s,])")


@dataclass(frozen=True)
class _Read(Generic[Value]):
    began: float
    task: asyncio.Task[Value]


class ReadCache(Generic[Value]):
    """The latest reads by key. When they exceed `max_bytes`, as counted by `size_of`, the oldest ones are dropped.
    Failed reads are not kept. Use it on the event loop. `clock` returns seconds."""

    def __init__(self, size_of: Callable[[Value], int], max_bytes: int, clock: Callable[[], float]) -> None:
        self._size_of, self._max_bytes, self._clock = size_of, max_bytes, clock
        self._reads: dict[Hashable, _Read[Value]] = {}  # oldest first

    async def read(self, key: Hashable, max_age_s: float, make: Callable[[], Awaitable[Value]]) -> tuple[Value, float]:
        """Return (value, age in seconds) of the key's last read, if it began at most `max_age_s` ago; otherwise of a
        new one.

        The read continues if one of its waiters is cancelled. Raises what `make` raises.
        """
        now = self._clock()
        known = self._reads.get(key)
        if known is None or now - known.began > max_age_s:
            self._reads.pop(key, None)
            known = self._reads[key] = _Read(now, asyncio.ensure_future(make()))
            known.task.add_done_callback(partial(self._done, key))
        return await asyncio.shield(known.task), now - known.began

    def _done(self, key: Hashable, task: asyncio.Task[Value]) -> None:
        """Drop a failed read, and the oldest reads beyond `max_bytes`."""
        kept = self._reads.get(key)
        if kept is not None and kept.task is task and (task.cancelled() or task.exception() is not None):
            del self._reads[key]
        free = self._max_bytes
        for each in reversed(list(self._reads)):
            read = self._reads[each]
            if read.task.done():
                free -= READ_BYTES + self._size_of(read.task.result())
                if free < 0:
                    del self._reads[each]


class Caches:
    """The caches of an application: JSON responses, metrics, and pages of the event streams."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.responses = ReadCache[bytes](len, MAX_BYTES, clock)
        self.metrics = ReadCache[bytes](len, MAX_BYTES, clock)
        self.events = ReadCache[Page[Event]](lambda page: EVENT_BYTES * len(page.items), MAX_BYTES, clock)


async def on_read_thread(service: Coordinator, report: Callable[[], Value]) -> Value:
    """Return `report()`, called on one of the read threads."""
    return await anyio.to_thread.run_sync(report, limiter=service.read_threads)


async def cached_response(http: Request, report: Callable[..., BaseModel], *arguments: Any) -> Response:
    """Return `report(*arguments)` as JSON. It must depend on nothing else, because other clients may get the same
    response."""
    service: Coordinator = http.app.state.coordinator
    caches: Caches = http.app.state.caches

    def encoded() -> bytes:
        return report(*arguments).model_dump_json().encode()

    max_age_s = _max_age_s(http)
    if not max_age_s:
        return Response(await on_read_thread(service, encoded), media_type="application/json")
    make = partial(on_read_thread, service, encoded)
    content, age_s = await caches.responses.read((report, *arguments), max_age_s, make)
    return Response(content, headers={"Age": str(math.ceil(age_s))}, media_type="application/json")


def _max_age_s(http: Request) -> int:
    """Return the largest age in seconds that the client accepts; 0: only a fresh response."""
    found = _MAX_AGE.search(http.headers.get("cache-control", ""))
    return min(int(found[1]), MAX_AGE_S) if found else 0
