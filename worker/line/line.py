"""A rate that one way of the line is held to, so that the box's other traffic has the rest.

One way of the line, up or down: the parts of transfers go over it in the order in which they came, on as many
connections at once as it rewards.

In order every worker's first fragment arrives first, so that its delta comes down while the others still go up. A turn
is over with the last byte, before the answer: so the next part follows while the coordinator makes this one durable.

The line to the coordinator: its connections, and its two ways, up and down.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from outerstep.common import tracing
from outerstep.common.connections import BBR
from worker.line.connections import UNSENT_FAR_BYTES, Connections, Stalls
from worker.line.meter import WINDOW_S, Meter, Width

AHEAD_S = 0.1  # of the rate that may be used at once, after a silence


class Pace:
    """Of so many bits per second, None: as fast as it goes. Thread-safe. `clock` gives seconds."""

    def __init__(self, bits_per_s: float | None, clock: Callable[[], float]) -> None:
        self._bits_per_s, self._clock = bits_per_s, clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def delay_s(self, count: int) -> float:
        """Take a place for `count` bytes; return how long to wait before they may go, or after they have come."""
        if self._bits_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            at = max(self._free_at, now - AHEAD_S)
            self._free_at = at + 8 * count / self._bits_per_s
        return max(at - now, 0.0)


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


UP = (1, 32)  # connections: the least and the most
DOWN = (4, 64)  # the deltas of four fragments are waited for at once
FAR_S = 0.015  # a round trip from which on a line is begun with more connections
UP_FAR, DOWN_FAR = 4, 32
# Of a part: the least, and the most. On far lines connections share a way as they like, and what comes down comes after
# a silence, as fast as new windows open: many small ones are there in their order, and first.
PART_BYTES = (1 << 18, 1 << 20)
UP_FAR_BYTES, DOWN_FAR_BYTES = (1 << 17, 1 << 18), (1 << 16, 1 << 20)
_ROUND_TRIPS = 4  # of a measurement of the width, at least
_ASKED = 8  # times: then the shortest says more than how busy this machine is


class Line:
    """The line of one client; all that it sends and fetches goes over it, transfers at `max_up` and `max_down` bits per
    second at most. `clock` gives seconds. Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_up: float | None = None,
        max_down: float | None = None,
    ) -> None:
        self._beginning = threading.Lock()
        self.is_far = False  # opening a connection takes a time that is worth sparing
        self.connections = Connections(self._opened)
        underway = self.connections.unacknowledged_bytes
        full = self.connections.queues
        self.up = Way("send", Width(*UP), PART_BYTES, Pace(max_up, clock), clock=clock, underway=underway, full=full)
        self.down = Way("fetch", Width(*DOWN), PART_BYTES, Pace(max_down, clock), clock=clock)
        self.stalls = Stalls(
            self.connections,
            lambda: self.up.meter.carried_bytes + self.down.meter.carried_bytes,
            lambda: self.down.meter.carrying > 0,
        )
        self.round_trip_s: float | None = None  # the shortest that was seen, with what the coordinator took of it
        self._answers = 0

    def answered(self, seconds: float) -> None:
        """A small request was answered after so long."""
        self.round_trip_s = seconds if self.round_trip_s is None else min(self.round_trip_s, seconds)
        self._answers += 1
        for way in (self.up, self.down):
            way.meter.window_s = max(WINDOW_S, _ROUND_TRIPS * self.round_trip_s)
        if self._answers >= _ASKED and self.round_trip_s >= FAR_S:
            self._begin_far()

    def _opened(self, round_trip_s: float) -> None:
        """A connection was opened, to the coordinator or to a proxy: the coordinator is as far away or farther."""
        if round_trip_s >= FAR_S:
            self._begin_far()

    def _begin_far(self) -> None:
        with self._beginning:
            begins, self.is_far = not self.is_far, True
        if begins and self.connections.congestion_control != BBR:  # by which one connection fills it
            self.connections.unsent_bytes = UNSENT_FAR_BYTES
            self.up.begin_far(UP_FAR, UP_FAR_BYTES)
            self.down.begin_far(DOWN_FAR, DOWN_FAR_BYTES)
