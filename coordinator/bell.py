"""Wakes the requests that wait for a run to change. Rung from any thread; waited for on the event loop.

A ring is of one topic, so that it wakes those whom it concerns: a thousand workers wait, and every contribution to a
round is an event.
"""

import asyncio
import itertools
from collections import defaultdict

from anyio import CapacityLimiter

EVENTS, ASSIGNMENTS = "events", "assignments"
# How many of those that were woken look at the run at the same time, each on a thread. More would not be faster, for
# there is one interpreter lock, and heartbeats would have to wait for them all.
LOOKS_AT_ONCE = 2


def delta_of(fragment: int) -> str:
    """The topic of those who wait for a fragment's delta."""
    return f"delta {fragment}"


class Bell:
    """One asyncio event per run and topic, renewed at every ring.

    Take `next_ring` first, then look, then wait: so no ring is missed.
    """

    def __init__(self) -> None:
        self._events: defaultdict[str, defaultdict[str, asyncio.Event]] = defaultdict(
            lambda: defaultdict(asyncio.Event)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.looks: CapacityLimiter | None = None
        self._asked = itertools.count()
        self.closed = False

    def spread(self) -> float:
        """The next of a sequence of numbers from 0 to 1 that lie far apart: multiples of the golden ratio."""
        return next(self._asked) * 0.6180339887 % 1

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.looks = loop, CapacityLimiter(LOOKS_AT_ONCE)

    def ring(self, run: str, topic: str | None = None) -> None:
        """Wake those who wait for news of `topic`; None: of any."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, run, topic)

    def _ring(self, run: str, topic: str | None) -> None:
        events = self._events[run]
        for each in list(events) if topic is None else [topic]:
            events.pop(each, asyncio.Event()).set()

    def next_ring(self, run: str, topic: str) -> asyncio.Event:
        return self._events[run][topic]

    def close(self) -> None:
        """Let everybody go who waits, now and from now on: the server is stopping. On the event loop."""
        self.closed = True
        for run in list(self._events):
            self._ring(run, None)
