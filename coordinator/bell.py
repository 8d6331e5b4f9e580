"""Wakes the requests that wait for a run to change. Rung from any thread; waited for on the event loop."""

import asyncio
from collections import defaultdict


class Bell:
    """One asyncio event per run, renewed at every ring.

    Take `next_ring` first, then look, then wait: so no ring is missed.
    """

    def __init__(self) -> None:
        self._events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def ring(self, run: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, run)

    def _ring(self, run: str) -> None:
        self._events.pop(run, asyncio.Event()).set()

    def next_ring(self, run: str) -> asyncio.Event:
        return self._events[run]

    def close(self) -> None:
        """Let everybody go who waits, now and from now on: the server is stopping. On the event loop."""
        self.closed = True
        for event in self._events.values():
            event.set()
        self._events.clear()
