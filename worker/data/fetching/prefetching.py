"""Which shards of a remote set are fetched ahead of time, by several threads, in the order in which they will be used.

The units of this round are known from the worker's assignment. Those of the next round are guessed: as the coordinator
assigns units in order, the next round's are assumed to lie as far after this round's as these lie after the previous
one's. Guessed shards are fetched last, and only as far as there is room beside the others, so a wrong guess costs
nothing but the transfer.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence

from protocol.errors import OuterstepError
from worker.data.order import WINDOW_SHARDS, Order
from worker.errors import Stopped

THREADS = 4  # it takes several connections to use all of a line with a long round trip
_CLOSE_TIMEOUT_S = 3.0

log = logging.getLogger(__name__)


class Prefetcher:
    """Fetches expected shards in THREADS threads, which start with the first call.

    `fetch(shard)` fetches a shard of `sizes[shard]` bytes. It raises Stopped soon after `closing` is set, as `close`
    does, which ends the thread. A shard is fetched once there is room for it in `limit_bytes` beside those that are
    needed sooner.

    The owner must close it. It is also closed when the process exits, because a library that is running in a thread at
    that time may crash the process.
    """

    def __init__(
        self, fetch: Callable[[int], None], sizes: Sequence[int], limit_bytes: int, closing: threading.Event
    ) -> None:
        self._fetch, self._sizes, self._limit_bytes, self._closing = fetch, sizes, limit_bytes, closing
        self._changed = threading.Condition()
        self._expected: list[int] = []
        self._next = 0  # index in `_expected` of the next shard to fetch
        self._reached = 0  # index in `_expected` of the last shard that was used
        self._round: range | None = None  # the units that were expected last
        self._threads: list[threading.Thread] = []

    def __call__(self, order: Order, units: Sequence[int]) -> None:
        """Fetch the shards of these units, and then those of the guessed units of the next round."""
        shards = dict.fromkeys(shard for unit in [*units, *self._guess(units)] for shard in order.shards(unit))
        with self._changed:
            self._expected, self._next, self._reached = list(shards), 0, 0
            self._changed.notify_all()
            if not self._threads:
                self._threads = [threading.Thread(target=self._run, name="fetch", daemon=True) for _ in range(THREADS)]
                for thread in self._threads:
                    thread.start()
                atexit.register(self.close)

    def close(self) -> None:
        """Stop fetching. Waits briefly for fetches that are in progress."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        atexit.unregister(self.close)

    @property
    def needed(self) -> list[int]:
        """The shards that are in use, or were prefetched and will be used."""
        with self._changed:
            return self._expected[self._needed_from : self._next]

    @property
    def _needed_from(self) -> int:
        return max(self._reached - WINDOW_SHARDS + 1, 0)

    def reached(self, shard: int) -> None:
        """Note that a shard is being used: shards of earlier windows are no longer needed."""
        with self._changed:
            if shard in self._expected:
                self._reached = max(self._reached, self._expected.index(shard))
                self._changed.notify_all()

    def _guess(self, units: Sequence[int]) -> range:
        """Return the guessed units of the next round. The last consecutive `units` are this round's."""
        first = last = units[-1]
        for unit in reversed(units):
            if unit < first - 1:
                break
            first = unit
        before, self._round = self._round, range(first, last + 1)
        distance = len(self._round) if before is None or before.start >= first else first - before.start
        return range(first + distance, last + distance + 1)

    def _run(self) -> None:
        while (shard := self._await_next()) is not None:
            try:
                self._fetch(shard)
            except Stopped:
                return
            except (OuterstepError, OSError) as error:
                log.warning("prefetching failed: %s", error)  # raised again when the shard is needed

    def _await_next(self) -> int | None:
        """Wait until the next shard can be fetched, and return it; None if there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or self._has_room())
            if self._closing.is_set():
                return None
            self._next += 1
            return self._expected[self._next - 1]

    def _has_room(self) -> bool:
        """Return True if there is a next shard, not one that training has passed, and room for it."""
        self._next = max(self._next, self._needed_from)
        ahead = self._expected[self._needed_from : self._next + 1]
        return self._next < len(self._expected) and sum(self._sizes[each] for each in ahead) <= self._limit_bytes
