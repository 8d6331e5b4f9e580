"""What one caller may take of the coordinator: requests per second, streams of events, bytes of messages at once.

A caller is whoever holds a token, by the hash of its secret. What is beyond is refused with `too-many-requests`, which
says when to ask again. All of it is on the event loop.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.settings import Settings
from protocol.errors import Problem

BURST_S = 5.0  # so many seconds' requests may come at once
SWEEP_AT = 4096  # callers that are remembered, before those with nothing to remember of are forgotten
ALL_TOKENS = 4  # so many times as many bytes of messages as one token may have, all together may
FREE_IN_S = 5.0  # a guess at when a stream or a message of the same caller has ended


class Rates:
    """How many requests each caller may still send: a bucket of BURST_S · `per_s`, into which `per_s` flow.
    `clock` gives seconds."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s, self._most, self._clock = per_s, max(1.0, per_s * BURST_S), clock
        self._left: dict[bytes, tuple[float, float]] = {}  # how many there were, and when

    def __len__(self) -> int:
        """How many callers are remembered."""
        return len(self._left)

    def take(self, caller: bytes, cost: float = 1.0) -> None:
        """Count a request. Raises Problem `too-many-requests` where nothing is left.

        Whoever has one left may ask for what costs more, and then waits the longer.
        """
        now = self._clock()
        left = self._left_at(now, *self._left.get(caller, (self._most, now)))
        if left < 1:
            detail = f"this token may send {self._per_s:g} requests per second, of which large ones count as many"
            raise Problem("too-many-requests", detail, retry_after_s=(1 - left) / self._per_s)
        if caller not in self._left and len(self._left) >= SWEEP_AT:
            self._left = {each: then for each, then in self._left.items() if self._left_at(now, *then) < self._most}
        self._left[caller] = left - cost, now

    def _left_at(self, now: float, left: float, then: float) -> float:
        return min(self._most, left + (now - then) * self._per_s)


class Callers:
    """The callers, and what they have at the moment."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self.rates = Rates(settings.requests_per_s, clock)
        self._streams: Counter[bytes] = Counter()
        self._bytes: Counter[bytes] = Counter()

    @property
    def streams(self) -> int:
        """How many streams of events there are."""
        return self._streams.total()

    @contextmanager
    def stream(self, caller: bytes) -> Iterator[None]:
        """Count a stream of events while the block runs. Raises Problem `too-many-requests`."""
        most = self._settings.streams_per_token
        if self._streams[caller] >= most:
            raise _too_many(f"this token has {most} streams of events, as many as it may have at once; close one")
        with _counted(self._streams, caller, 1):
            yield

    @contextmanager
    def message(self, caller: bytes, size: int) -> Iterator[None]:
        """Count the bytes of a message while the block runs. Raises Problem `too-many-requests`."""
        most = self._settings.message_bytes_per_token
        if self._bytes[caller] + size > most:
            raise _too_many(f"messages of this token are {self._bytes[caller]} bytes, and may be {most} at once")
        if self._bytes.total() + size > ALL_TOKENS * most:
            raise _too_many(f"all messages together may be {ALL_TOKENS * most} bytes at once")
        with _counted(self._bytes, caller, size):
            yield


def _too_many(detail: str) -> Problem:
    return Problem("too-many-requests", detail, retry_after_s=FREE_IN_S)


@contextmanager
def _counted(counts: Counter[bytes], caller: bytes, count: int) -> Iterator[None]:
    counts[caller] += count
    try:
        yield
    finally:
        counts[caller] -= count
        if not counts[caller]:
            del counts[caller]
