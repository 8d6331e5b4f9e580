"""The bell, which wakes the requests that wait for a run to change. Rung from any thread; waited for on the event loop.

Every ring has a topic and wakes only those who wait for it: a thousand workers wait, and every contribution to a round
is an event. The woken requests are released a few at a time, and other requests are answered in between: to answer a
thousand takes a second, and heartbeats must not wait that long. Requests of others than members are released one after
another with a pause between them: nobody trains on their answers. Most are streams of events, pages of a browser, which
then ask for all that has changed.
"""

import asyncio
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from anyio import CapacityLimiter

EVENTS, ASSIGNMENTS = "events", "assignments"
# How many long polls read a run at the same time, each on a thread. More would not be faster, for there is one
# interpreter lock, and heartbeats would have to wait for them all.
READS_AT_ONCE = 2
RELEASED_AT_ONCE = 2  # of the woken requests, in one pass of the event loop
PAUSE_S = 0.02  # between two that are woken slowly


def delta_of(fragment: int) -> str:
    """Return the topic of those who wait for a fragment's delta."""
    return f"delta {fragment}"


class Bell:
    """One asyncio event per waiting request, set once after a ring of its run and topic.

    Begin to listen, then read the run, then wait: in this order no ring is missed.
    """

    def __init__(self) -> None:
        # By run and topic, in the order of waking; True for those that are woken one by one, with a pause between them.
        self._listening: defaultdict[str, defaultdict[str, dict[asyncio.Event, bool]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._woken: deque[asyncio.Event] = deque()
        self._woken_slowly: deque[asyncio.Event] = deque()
        self._pausing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.reading = asyncio.Semaphore(READS_AT_ONCE)
        self.threads: CapacityLimiter | None = None  # for long polls alone: uploads may take all the others
        self._asked = itertools.count()
        self._rung: Counter[str] = Counter()  # by run
        self.closed = False

    def spread(self) -> float:
        """Return the next of a sequence of numbers in [0, 1) that lie far apart: multiples of the golden ratio."""
        return next(self._asked) * 0.6180339887 % 1

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.threads = loop, CapacityLimiter(READS_AT_ONCE)

    def ring(self, run: str, topic: str | None = None) -> None:
        """Wake those who wait for `topic`; None: all who wait for the run."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, run, topic)

    def _ring(self, run: str, topic: str | None) -> None:
        self._rung[run] += 1
        idle = not self._woken
        for each in [topic] if topic is not None else list(self._listening[run]):
            for ring, slowly in self._listening[run].pop(each, {}).items():
                (self._woken_slowly if slowly else self._woken).append(ring)
        if idle:
            self._release()
        if not self._pausing:
            self._release_slowly()

    def _release(self) -> None:
        for _ in range(min(RELEASED_AT_ONCE, len(self._woken))):
            self._woken.popleft().set()
        if self._woken:
            assert self._loop is not None
            self._loop.call_soon(self._release)

    def _release_slowly(self) -> None:
        self._pausing = bool(self._woken_slowly) and not self.closed
        if self._pausing:
            self._woken_slowly.popleft().set()
            assert self._loop is not None
            self._loop.call_later(PAUSE_S, self._release_slowly)

    @contextmanager
    def listening(self, run: str, topic: str, *, slowly: bool = False) -> Iterator[asyncio.Event]:
        """Give an event that the next ring of `topic` sets, for one request to wait for. On the event loop. `slowly`:
        nobody trains on the answer, as is so of all events."""
        ring = asyncio.Event()
        listening = self._listening[run][topic]
        listening[ring] = slowly or topic == EVENTS
        try:
            yield ring
        finally:
            listening.pop(ring, None)

    def rung(self, run: str) -> int:
        """Return how often somebody of this run was woken: what is read from now on is at least as new as that."""
        return self._rung[run]

    def is_listened_to(self, run: str, topic: str) -> bool:
        """Return True if somebody waits for `topic`, or reads the run in order to."""
        return run in self._listening and bool(self._listening[run].get(topic))

    def close(self) -> None:
        """Release all who wait, and let nobody wait from now on: the server is stopping. On the event loop."""
        self.closed = True
        for run in list(self._listening):
            self._ring(run, None)
        while self._woken_slowly:
            self._woken_slowly.popleft().set()
