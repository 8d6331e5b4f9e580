"""The requests that wait for a run to change: long polls and event streams. Any thread may wake them; they wait on the
event loop.

Every wake-up has a topic and reaches only the requests that wait for it, because a thousand workers may wait and every
contribution to a round is an event. Woken requests are released a few at a time, and other requests are answered in
between: a thousand answers take a second, and heartbeats must not wait that long. Requests from non-members are
released one by one, with a pause in between, because no training waits for them. Most of them are browsers' event
streams, and each of those then reads everything that has changed.
"""

import asyncio
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from anyio import CapacityLimiter

EVENTS, ASSIGNMENTS = "events", "assignments"
# How many long polls read a run at the same time, each on a thread. More would not be faster, because threads share the
# interpreter lock, and heartbeats would have to wait for all of them.
READS_AT_ONCE = 2
RELEASED_AT_ONCE = 2  # woken requests per pass of the event loop
PAUSE_S = 0.02  # between two requests that are released slowly


def delta_of(fragment: int) -> str:
    """Return the topic of the requests that wait for a fragment's delta."""
    return f"delta {fragment}"


class Waiters:
    """One asyncio event per waiting request, set once after a wake-up of its run and topic.

    Register, then read the run, then wait. In this order no wake-up is missed.
    """

    def __init__(self) -> None:
        # By run and topic, in the order of waking. The value is True for requests that are released slowly.
        self._waiting: defaultdict[str, defaultdict[str, dict[asyncio.Event, bool]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._woken: deque[asyncio.Event] = deque()
        self._woken_slowly: deque[asyncio.Event] = deque()
        self._pausing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.reading = asyncio.Semaphore(READS_AT_ONCE)
        self.threads: CapacityLimiter | None = None  # for long polls alone: uploads may take all other threads
        self._polls = itertools.count()
        self._wakes: Counter[str] = Counter()  # by run
        self.closed = False

    def jitter(self) -> float:
        """Return the next of a sequence of well-spread numbers in [0, 1): multiples of the golden ratio."""
        return next(self._polls) * 0.6180339887 % 1

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this event loop. Wake-ups before this call do nothing."""
        self._loop, self.threads = loop, CapacityLimiter(READS_AT_ONCE)

    def wake(self, run: str, topic: str | None = None) -> None:
        """Wake the requests that wait for `topic` of the run; None: for any topic. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, run, topic)

    def _wake(self, run: str, topic: str | None) -> None:
        self._wakes[run] += 1
        idle = not self._woken
        for each in [topic] if topic is not None else list(self._waiting[run]):
            for woken, slowly in self._waiting[run].pop(each, {}).items():
                (self._woken_slowly if slowly else self._woken).append(woken)
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
    def register(self, run: str, topic: str, *, slowly: bool = False) -> Iterator[asyncio.Event]:
        """Yield an event for one request; the next wake-up of `topic` sets it. Call on the event loop. `slowly`:
        release the request slowly, because no training waits for the answer; always done for EVENTS."""
        woken = asyncio.Event()
        waiting = self._waiting[run][topic]
        waiting[woken] = slowly or topic == EVENTS
        try:
            yield woken
        finally:
            waiting.pop(woken, None)

    def wake_count(self, run: str) -> int:
        """Return how many wake-ups this run has had. Values read after this call are at least as new as the last
        wake-up."""
        return self._wakes[run]

    def has_waiters(self, run: str, topic: str) -> bool:
        """Return True if a request waits for `topic`, or is reading the run before it waits."""
        return run in self._waiting and bool(self._waiting[run].get(topic))

    def close(self) -> None:
        """Release all requests, because the server is stopping; later ones do not wait. Call on the event loop."""
        self.closed = True
        for run in list(self._waiting):
            self._wake(run, None)
        while self._woken_slowly:
            self._woken_slowly.popleft().set()
