"""Quotas: limits on what one caller may use. They count requests per second, and what is in use at the same time: event
streams, long polls, line checks, and bytes of messages and uploads.

All tokens that were exchanged for one join token are one caller, because the join token's holder can make as many of
them as the join token has uses. A member is a separate caller for what training needs: heartbeats, assignments,
contributions and deltas. Its listings and streams count towards its token. A request above the quota is rejected with
`too-many-requests` and Retry-After. Use this module on the event loop only.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from coordinator.settings import Settings
from coordinator.store.identity import Identity
from protocol.errors import Problem

BURST_S = 5.0  # a caller may send the requests of 5 s at once
SWEEP_AT = 4096  # with this many callers, those with a full bucket are dropped
ALL_TOKENS = 4  # limit for all tokens together, as a multiple of the limit per token
LINE_CHECKS = 4  # at once, for all callers together; each caller may have one
SHARED = "which it shares with all tokens exchanged for the same join token"
RETRY_S = 5.0  # a guess at when the caller's stream or message will have ended


def lineage_of(identity: Identity) -> Hashable:
    """Return the caller for a token's reads: all tokens that were exchanged for the same join token."""
    return identity.lineage or identity.secret_hash


def caller_of(identity: Identity) -> Hashable:
    """Return the caller for a request. A member is a separate caller; for other tokens it is `lineage_of`."""
    return lineage_of(identity) if identity.member is None else identity.secret_hash


class RateLimiter:
    """A token bucket per caller, of BURST_S · `per_s` requests, refilled at `per_s`. `clock` returns seconds."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s, self._size, self._clock = per_s, max(1.0, per_s * BURST_S), clock
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # requests left, and the time of that count

    def __len__(self) -> int:
        """Return the number of callers with a bucket."""
        return len(self._buckets)

    def take(self, caller: Hashable, cost: float = 1.0) -> None:
        """Count a request. Raises Problem `too-many-requests` if less than one request is left.

        A caller with at least one request left may make a request that costs more; then the next one has to wait
        longer.
        """
        now = self._clock()
        left = self._left_at(now, *self._buckets.get(caller, (self._size, now)))
        if left < 1:
            detail = (
                f"the limit for this token is {self._per_s:g} requests per second, {SHARED}; a large request counts as "
                "several"
            )
            raise Problem("too-many-requests", detail, retry_after_s=(1 - left) / self._per_s)
        if caller not in self._buckets and len(self._buckets) >= SWEEP_AT:
            self._buckets = {
                each: bucket for each, bucket in self._buckets.items() if self._left_at(now, *bucket) < self._size
            }
        self._buckets[caller] = left - cost, now

    def _left_at(self, now: float, left: float, then: float) -> float:
        return min(self._size, left + (now - then) * self._per_s)


class Quotas:
    """What each caller uses at the moment, and its limits."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self.rates = RateLimiter(settings.requests_per_s, clock)
        self._streams: Counter[Hashable] = Counter()
        self._polls: Counter[Hashable] = Counter()
        self._line_checks: Counter[Hashable] = Counter()
        self._bytes: Counter[Hashable] = Counter()
        self._uploads: Counter[Hashable] = Counter()

    @property
    def streams(self) -> int:
        """The number of streams of events."""
        return self._streams.total()

    @property
    def polls(self) -> int:
        """The number of long polls; those of admins do not count."""
        return self._polls.total()

    @contextmanager
    def stream(self, caller: Hashable) -> Iterator[None]:
        """Count a stream of events while the block runs. Raises Problem `too-many-requests`."""
        with _one_more(self._streams, caller, self._settings.streams_per_token, "streams of events"):
            yield

    @contextmanager
    def poll(self, caller: Hashable) -> Iterator[None]:
        """Count a long poll while the block runs. Raises Problem `too-many-requests`."""
        with _one_more(self._polls, caller, self._settings.polls_per_token, "long polls"):
            yield

    @contextmanager
    def line_check(self, caller: Hashable) -> Iterator[None]:
        """Count a line check while the block runs. Raises Problem `too-many-requests`."""
        if not self._line_checks[caller] and self._line_checks.total() >= LINE_CHECKS:
            raise _too_many(f"{LINE_CHECKS} line checks are running, the limit for all tokens together")
        with _one_more(self._line_checks, caller, 1, "line check"):
            yield

    def uploading(self, owner: Hashable) -> int:
        """Return the bytes of this owner's uploads in progress."""
        return self._uploads[owner]

    @contextmanager
    def upload(self, owner: Hashable, size: int, max_bytes: int) -> Iterator[None]:
        """Count the bytes of an upload while the block runs. Raises Problem `too-many-requests` if the owner's uploads
        exceed `max_bytes` together; a single upload is always admitted."""
        if self._uploads[owner] and self._uploads[owner] + size > max_bytes:
            raise _too_many(
                f"uploads of {self._uploads[owner]} bytes are in progress; at most {max_bytes} may be at once"
            )
        with _counted(self._uploads, owner, size):
            yield

    @contextmanager
    def message(self, caller: Hashable, size: int) -> Iterator[None]:
        """Count the bytes of a message while the block runs. Raises Problem `too-many-requests`."""
        max_bytes = self._settings.message_bytes_per_token
        if self._bytes[caller] + size > max_bytes:
            raise _too_many(f"messages of this token have {self._bytes[caller]} bytes; at most {max_bytes} at once")
        if self._bytes.total() + size > ALL_TOKENS * max_bytes:
            raise _too_many(f"messages of all tokens have at most {ALL_TOKENS * max_bytes} bytes at once")
        with _counted(self._bytes, caller, size):
            yield


def _too_many(detail: str) -> Problem:
    return Problem("too-many-requests", detail, retry_after_s=RETRY_S)


@contextmanager
def _one_more(counts: Counter[Hashable], caller: Hashable, limit: int, what: str) -> Iterator[None]:
    """Count one while the block runs. Raises Problem `too-many-requests` if the caller already has `limit`."""
    if counts[caller] >= limit:
        raise _too_many(f"the limit for this token is {limit} {what} at once, {SHARED}; end one")
    with _counted(counts, caller, 1):
        yield


@contextmanager
def _counted(counts: Counter[Hashable], caller: Hashable, count: int) -> Iterator[None]:
    counts[caller] += count
    try:
        yield
    finally:
        counts[caller] -= count
        if not counts[caller]:
            del counts[caller]
