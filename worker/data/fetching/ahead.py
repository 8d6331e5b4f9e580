"""Shards fetched ahead of need, by threads that take what is expected in order.

What is expected is known for this round, from the worker's assignment; of the next one it is guessed, as the
coordinator gives out units in order: it is as far on from this round's as that was from the one before. A guess is
fetched last and makes no room but of what is not expected, so a wrong one costs bytes and nothing else.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from protocol.errors import OuterstepError
from worker.data.order import WINDOW_SHARDS, Order
from worker.errors import NoRoom, Stopped
from worker.line.retry import Signal

THREADS = 4  # a long line is filled by several connections only
_LEAVE_WITHIN_S = 3.0
_LOOK_AGAIN_S = 5.0  # where there is no room: what is in the way will have been used some time

log = logging.getLogger(__name__)


class Closing:
    """A `Signal` for what is fetched ahead: set once `stop` is, or by `close`. Only `close` wakes who waits, as nobody
    waits for them."""

    def __init__(self, stop: Signal) -> None:
        self._stop, self._closed = stop, threading.Event()

    def close(self) -> None:
        self._closed.set()

    def is_set(self) -> bool:
        return self._closed.is_set() or self._stop.is_set()

    def wait(self, timeout: float) -> bool:
        self._closed.wait(timeout)
        return self.is_set()


class FetchAhead:
    """`fetch(shard, before)` has a shard at hand, or raises NoRoom if that is only where those in `before` are or will
    be, which are needed sooner; four threads call it, from the first call on, until it raises Stopped, as it does soon
    after `closing` is set. Whoever has one closes it; a process that ends does so too, as libraries at work in a thread
    may end it in their own way. What a thread does then is left as a kill would, which the next one goes on with."""

    def __init__(self, fetch: Callable[[int, Collection[int]], None], closing: Closing) -> None:
        self._fetch, self._closing = fetch, closing
        self._changed = threading.Condition()
        self._expected: list[int] = []
        self._next = 0  # place among the expected of what is fetched next
        self._reached = 0  # and of the last shard that was used
        self._round: range | None = None  # units that were expected last
        self._threads: list[threading.Thread] = []

    def __call__(self, order: Order, units: Sequence[int]) -> None:
        """Have the shards of these units fetched, and then those of the next round's."""
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
        """Fetch nothing more, and wait a little for what is being fetched."""
        self._closing.close()
        with self._changed:
            self._changed.notify_all()
        give_up_at = time.monotonic() + _LEAVE_WITHIN_S
        for thread in self._threads:
            thread.join(max(give_up_at - time.monotonic(), 0))
        atexit.unregister(self.close)

    @property
    def needed(self) -> list[int]:
        """The shards that are being used, or were fetched ahead of their use."""
        with self._changed:
            return self._expected[self._needed_from : self._next]

    @property
    def _needed_from(self) -> int:
        return max(self._reached - WINDOW_SHARDS + 1, 0)

    def reached(self, shard: int) -> None:
        """Note that a shard is used, so that those in windows before its own are not needed any more."""
        with self._changed:
            if shard in self._expected:
                self._reached = max(self._reached, self._expected.index(shard))

    def _guess(self, units: Sequence[int]) -> range:
        """Return the units of the round after the one that `units` end with."""
        first = last = units[-1]
        for unit in reversed(units):
            if unit < first - 1:
                break
            first = unit
        before, self._round = self._round, range(first, last + 1)
        ahead = len(self._round) if before is None or before.start >= first else first - before.start
        return range(first + ahead, last + ahead + 1)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing.is_set() or self._next < len(self._expected))
                    if self._closing.is_set():
                        return
                    expected, place = self._expected, self._next
                    self._next += 1
                self._have(expected, place)
        except Stopped:
            return

    def _have(self, expected: list[int], place: int) -> None:
        while True:
            with self._changed:
                needed_from = self._needed_from
                if self._closing.is_set() or self._expected is not expected or place < needed_from:
                    return
            try:
                self._fetch(expected[place], expected[needed_from:place])
            except NoRoom:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closing.is_set() or self._expected is not expected, _LOOK_AGAIN_S
                    )
            except Stopped:
                raise
            except (OuterstepError, OSError) as error:
                log.warning("not fetched ahead: %s", error)  # raised where it is needed, if it is
                return
            else:
                return
