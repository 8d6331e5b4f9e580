"""Wakes the requests that wait for a run to change. Rung from any thread; waited for on the event loop.

A ring is of one topic, so that it wakes those whom it concerns: a thousand workers wait, and every contribution to a
round is an event. Those whom it wakes are let go a few at a time, and whatever else has come is answered in between: a
thousand who hear of a round at once are a second's work, and heartbeats must not wait for its end.
"""

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from anyio import CapacityLimiter

EVENTS, ASSIGNMENTS = "events", "assignments"
# How many look at a run at the same time, each on a thread. More would not be faster, for there is one interpreter
# lock, and heartbeats would have to wait for them all.
LOOKS_AT_ONCE = 2
LET_GO_AT_ONCE = 2  # in one pass of the event loop, of those who were woken


def delta_of(fragment: int) -> str:
    """The topic of those who wait for a fragment's delta."""
    return f"delta {fragment}"


class Bell:
    """One asyncio event per waiting request, set once after a ring of its run and topic.

    Begin to listen first, then look, then wait: so no ring is missed.
    """

    def __init__(self) -> None:
        # By run and topic. Their order is the order of waking; there are no values.
        self._listening: defaultdict[str, defaultdict[str, dict[asyncio.Event, None]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._woken: deque[asyncio.Event] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self.threads: CapacityLimiter | None = None  # of their own, for uploads may take all the others
        self._asked = itertools.count()
        self.closed = False

    def spread(self) -> float:
        """The next of a sequence of numbers from 0 to 1 that lie far apart: multiples of the golden ratio."""
        return next(self._asked) * 0.6180339887 % 1

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.threads = loop, CapacityLimiter(LOOKS_AT_ONCE)

    def ring(self, run: str, topic: str | None = None) -> None:
        """Wake those who wait for news of `topic`; None: of any."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, run, topic)

    def _ring(self, run: str, topic: str | None) -> None:
        idle = not self._woken
        for each in [topic] if topic is not None else list(self._listening[run]):
            self._woken.extend(self._listening[run].pop(each, {}))
        if idle:
            self._let_go()

    def _let_go(self) -> None:
        for _ in range(min(LET_GO_AT_ONCE, len(self._woken))):
            self._woken.popleft().set()
        if self._woken:
            assert self._loop is not None
            self._loop.call_soon(self._let_go)

    @contextmanager
    def listening(self, run: str, topic: str) -> Iterator[asyncio.Event]:
        """An event that is set after the next ring, for one to wait for. On the event loop."""
        ring = asyncio.Event()
        listening = self._listening[run][topic]
        listening[ring] = None
        try:
            yield ring
        finally:
            listening.pop(ring, None)

    def close(self) -> None:
        """Let everybody go who waits, now and from now on: the server is stopping. On the event loop."""
        self.closed = True
        for run in list(self._listening):
            self._ring(run, None)
