"""One way of the line, up or down: the parts of transfers go over it in the order in which they came, on as many
connections at once as it rewards.

In order every worker's first fragment arrives first, so that its delta comes down while the others still go up. A turn
is over with the last byte, before the answer: so the next part follows while the coordinator makes this one durable.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from outerstep.common import tracing
from worker.line.meter import Meter
from worker.line.pacing import Pace
from worker.line.width import Width

_ANSWERS = 8  # that may be waited for, beside all that is sent
_LEAST_S = 0.2  # of the whole line's time, for a part

Range = tuple[int, int]  # half-open


class Way:
    """One way of the line to one coordinator. Thread-safe.

    width        so many transfers as its `least` is at first share its connections
    part_bytes   of a part: the least and the most
    pace         that all keep to
    underway     how much of what was handed to the kernel has not arrived
    full         whether a queue stands before the line
    """

    def __init__(
        self,
        name: str,
        width: Width,
        part_bytes: Range,
        pace: Pace,
        *,
        clock: Callable[[], float] = time.monotonic,
        underway: Callable[[], int] = lambda: 0,
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._tickets = itertools.count()
        self._waiting: deque[int] = deque()
        self.meter = Meter(width, clock, underway, full)
        self._together, self._part_bytes = width.least, part_bytes
        self._pool = ThreadPoolExecutor(width.most + _ANSWERS, name)
        self.width, self.rate, self.pace = width, self.meter.rate, pace

    def cut(self, size: int) -> list[Range]:
        """Return the parts of a transfer of `size` bytes."""
        share = self.width.now // self._together
        if share == 1:
            return [(0, size)]
        least, most = self._part_bytes
        wide = int(self.rate.bytes_per_s * _LEAST_S)  # each part is a request, which costs both sides some milliseconds
        part = min(max(-(-size // share), least, wide), max(most, wide))
        return [(start, min(start + part, size)) for start in range(0, size, part)]

    def begin_far(self, count: int, part_bytes: Range) -> None:
        """Begin with so many connections, and never use fewer from now on."""
        self._part_bytes = part_bytes
        with self._changed:
            self.width.begin_with(count)
            self._changed.notify_all()

    def call(self, act: Callable[[], object], times: int) -> None:
        """Call it so many times, each on a thread of its own. Nobody waits."""
        for _ in range(times):
            self._pool.submit(act)

    def carry(self, parts: Sequence[Callable[[], None]]) -> None:
        """Call all of them, each of which takes its `turn`, in order; of several each on a thread of its own. Return
        when all have returned; raise what the first of them raised."""
        if len(parts) == 1:
            parts[0]()
            return
        calls = [self._pool.submit(tracing.elsewhere(part)) for part in parts]
        errors = [call.exception() for call in calls]
        for error in errors:
            if error is not None:
                raise error

    @contextmanager
    def turn(self) -> Iterator["Turn"]:
        """Wait until it is the caller's turn. It is over with the block, if not before."""
        with self._changed:
            ticket = next(self._tickets)
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] == ticket and self.meter.turns < self.width.now)
                self.meter.turns += 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        turn = Turn(self._changed, self.meter, self._waiting)
        try:
            yield turn
        finally:
            turn.over()


class Turn:
    """A turn on one way. What it moves is counted."""

    def __init__(self, changed: threading.Condition, meter: Meter, waiting: Collection[int]) -> None:
        self._changed, self._meter, self._waiting = changed, meter, waiting
        self._carried = self._over = False

    def moved(self, count: int) -> None:
        """Count bytes that were sent, or have arrived."""
        with self._changed:
            width = self._meter.width.now
            if not self._carried:
                self._carried = True
                self._meter.begun()
            self._meter.moved(count)
            if self._meter.width.now > width:
                self._changed.notify_all()

    def over(self) -> None:
        """Let the next one begin."""
        with self._changed:
            if not self._over:
                self._over = True
                self._meter.over(self._carried, followed=len(self._waiting) > 0)
                self._changed.notify_all()
