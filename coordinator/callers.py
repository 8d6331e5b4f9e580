"""What one caller may take of the coordinator: requests per second; streams of events, long polls, line checks and
bytes of messages and of uploads at once.

Tokens that were exchanged for one join token are one caller: its holder can make as many of them as it has uses. A
member is a caller by itself in what training needs: heartbeats, assignments, contributions and deltas. Its
listings and streams count with its token. What is beyond is refused with `too-many-requests`, which says when to ask
again. All of it is on the event loop.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from coordinator.settings import Settings
from coordinator.store.identity import Identity
from protocol.errors import Problem

BURST_S = 5.0  # so many seconds' requests may come at once
SWEEP_AT = 4096  # callers that are remembered, before those with nothing to remember of are forgotten
ALL_TOKENS = 4  # so many times as many bytes of messages as one token may have, all together may
LINE_CHECKS = 4  # at once, of all callers together; of one caller one
SHARED = "which it shares with all tokens exchanged for the same join token"
FREE_IN_S = 5.0  # a guess at when a stream or a message of the same caller has ended


def lineage_of(identity: Identity) -> Hashable:
    """Return the caller that a token's reading counts with: all tokens that were exchanged for one join token."""
    return identity.lineage or identity.secret_hash


def caller_of(identity: Identity) -> Hashable:
    """Return the caller that a request counts with: a member by itself, else `lineage_of`."""
    return lineage_of(identity) if identity.member is None else identity.secret_hash


class Rates:
    """How many requests each caller may still send: a bucket of BURST_S · `per_s`, into which `per_s` flow.
    `clock` gives seconds."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s, self._most, self._clock = per_s, max(1.0, per_s * BURST_S), clock
        self._left: dict[Hashable, tuple[float, float]] = {}  # how many there were, and when

    def __len__(self) -> int:
        """How many callers are remembered."""
        return len(self._left)

    def take(self, caller: Hashable, cost: float = 1.0) -> None:
        """Count a request. Raises Problem `too-many-requests` where nothing is left.

        Whoever has one left may ask for what costs more, and then waits the longer.
        """
        now = self._clock()
        left = self._left_at(now, *self._left.get(caller, (self._most, now)))
        if left < 1:
            detail = (
                f"{self._per_s:g} requests per second are the limit for this token, {SHARED}; large ones count as many"
            )
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
        self._streams: Counter[Hashable] = Counter()
        self._polls: Counter[Hashable] = Counter()
        self._line_checks: Counter[Hashable] = Counter()
        self._bytes: Counter[Hashable] = Counter()
        self._uploads: Counter[Hashable] = Counter()

    @property
    def streams(self) -> int:
        """How many streams of events there are."""
        return self._streams.total()

    @property
    def polls(self) -> int:
        """How many long polls there are, but for those of admins."""
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
            raise _too_many(f"{LINE_CHECKS} line checks are under way, as many as there may be at once")
        with _one_more(self._line_checks, caller, 1, "line check"):
            yield

    def uploading(self, owner: Hashable) -> int:
        """Return how many bytes of uploads of this owner are arriving."""
        return self._uploads[owner]

    @contextmanager
    def upload(self, owner: Hashable, size: int, most_bytes: int) -> Iterator[None]:
        """Count the bytes of an upload while the block runs; one is always taken. Raises Problem `too-many-requests`
        where they and others of this owner that are arriving are more than `most_bytes`."""
        if self._uploads[owner] and self._uploads[owner] + size > most_bytes:
            raise _too_many(f"uploads of {self._uploads[owner]} bytes are arriving, and may be {most_bytes} at once")
        with _counted(self._uploads, owner, size):
            yield

    @contextmanager
    def message(self, caller: Hashable, size: int) -> Iterator[None]:
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
def _one_more(counts: Counter[Hashable], caller: Hashable, most: int, what: str) -> Iterator[None]:
    """Count one while the block runs. Raises Problem `too-many-requests` if the caller has `most` already."""
    if counts[caller] >= most:
        raise _too_many(f"{most} {what} at once is the limit for this token, {SHARED}; end one")
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
