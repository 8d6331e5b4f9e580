"""The line to the coordinator: its connections and its two directions, up and down.

In each direction, the parts of transfers go in the order in which they were asked for, over as many parallel
connections as pay off (meter.py). In order, so that every worker's first fragment arrives first and its delta comes
down while the others still go up. A slot is released after the last byte, before the answer: the next part follows
while the coordinator makes this one durable.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from outerstep.common.connections import BBR
from worker.line.connections import UNSENT_FAR_BYTES, Connections, StallWatch
from worker.line.meter import WINDOW_S, Meter, ParallelConnections

AHEAD_S = 0.1  # seconds of the rate that may be used at once after a silence


class RateLimit:
    """Limits one direction to `bits_per_s` (None: no limit), leaving the rest to the box's other traffic. Thread-safe.
    `clock` gives seconds."""

    def __init__(self, bits_per_s: float | None, clock: Callable[[], float]) -> None:
        self._bits_per_s, self._clock = bits_per_s, clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def delay_s(self, count: int) -> float:
        """Reserve `count` bytes; return the seconds to wait before sending, or after receiving them."""
        if self._bits_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            at = max(self._free_at, now - AHEAD_S)
            self._free_at = at + 8 * count / self._bits_per_s
        return max(at - now, 0.0)


_ANSWERS = 8  # requests that may wait for an answer, beside those that send
_LEAST_S = 0.2  # seconds at the direction's full rate, the least for a part
_PIECE_S = 0.01  # seconds at a connection's rate: a piece is what is sent at once, and costs 20 µs
PIECE_BYTES = (1 << 15, 1 << 18)  # the smallest and the largest

Range = tuple[int, int]  # half-open


class Direction:
    """One direction of the line. Thread-safe.

    parallel         how many connections to use; `parallel.least` transfers at the start share them
    part_bytes       the smallest and the largest part
    limit            the rate limit of all connections together
    unacknowledged   returns the bytes that the kernel has accepted and that have not arrived
    full             returns True if packets queue in front of the line
    """

    def __init__(
        self,
        name: str,
        parallel: ParallelConnections,
        part_bytes: Range,
        limit: RateLimit,
        *,
        clock: Callable[[], float] = time.monotonic,
        unacknowledged: Callable[[], int] = lambda: 0,
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._tickets = itertools.count()
        self._waiting: deque[int] = deque()
        self.meter = Meter(parallel, clock, unacknowledged, full)
        self._together, self._part_bytes = parallel.least, part_bytes
        self._pool = ThreadPoolExecutor(parallel.most + _ANSWERS, name)
        self.parallel, self.rate, self.limit = parallel, self.meter.rate, limit

    def split(self, size: int) -> list[Range]:
        """Return the byte ranges of the parts into which a transfer of `size` bytes is split."""
        share = self.parallel.now // self._together
        if share == 1:
            return [(0, size)]
        least, most = self._part_bytes
        wide = int(self.rate.bytes_per_s * _LEAST_S)  # each part is a request, which costs both sides some milliseconds
        part = min(max(-(-size // share), least, wide), max(most, wide))
        return [(start, min(start + part, size)) for start in range(0, size, part)]

    @property
    def piece_bytes(self) -> int:
        """How many bytes of a body to send at once."""
        return min(max(int(self.rate.bytes_per_s / self.parallel.now * _PIECE_S), PIECE_BYTES[0]), PIECE_BYTES[1])

    def set_far(self, count: int, part_bytes: Range) -> None:
        """Start again with `count` connections, and never use fewer from now on."""
        self._part_bytes = part_bytes
        with self._changed:
            self.parallel.restart_at(count)
            self._changed.notify_all()

    def start(self, act: Callable[[], object], times: int) -> None:
        """Call `act` this many times, each on its own thread, without waiting."""
        for _ in range(times):
            self._pool.submit(act)

    def run_all(self, parts: Sequence[Callable[[], None]]) -> None:
        """Call all of them, each on its own thread if there are several, and wait until all have returned. Raise the
        first one's error. Each takes a `slot`."""
        if len(parts) == 1:
            parts[0]()
            return
        calls = [self._pool.submit(part) for part in parts]
        errors = [call.exception() for call in calls]
        for error in errors:
            if error is not None:
                raise error

    @contextmanager
    def slot(self) -> Iterator["Slot"]:
        """Wait for a slot, in the order of the calls. It is released at the end of the block, if not before."""
        with self._changed:
            ticket = next(self._tickets)
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] == ticket and self.meter.slots < self.parallel.now)
                self.meter.slots += 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        slot = Slot(self._changed, self.meter, self._waiting)
        try:
            yield slot
        finally:
            slot.release()


class Slot:
    """The right to use one of the parallel connections. What it moves is counted."""

    def __init__(self, changed: threading.Condition, meter: Meter, waiting: Collection[int]) -> None:
        self._changed, self._meter, self._waiting = changed, meter, waiting
        self._active = self._released = False

    def moved(self, count: int) -> None:
        """Count bytes that were sent or have arrived."""
        with self._changed:
            parallel = self._meter.parallel.now
            if not self._active:
                self._active = True
                self._meter.started()
            self._meter.moved(count)
            if self._meter.parallel.now > parallel:
                self._changed.notify_all()

    def release(self) -> None:
        """Let the next part begin."""
        with self._changed:
            if not self._released:
                self._released = True
                self._meter.ended(self._active, followed=len(self._waiting) > 0)
                self._changed.notify_all()


UP = (1, 32)  # connections: the least and the most
DOWN = (4, 64)  # the deltas of four fragments are waited for at once
FAR_S = 0.015  # round trip from which a line starts with more connections
UP_FAR, DOWN_FAR = 4, 32
# The smallest and the largest part. On a far line, connections share the bandwidth unevenly, and a download starts
# slowly after each silence, as its windows open: many small parts arrive sooner and in order.
PART_BYTES = (1 << 18, 1 << 20)
UP_FAR_BYTES, DOWN_FAR_BYTES = (1 << 17, 1 << 18), (1 << 16, 1 << 20)
_ROUND_TRIPS = 4  # that a measurement of parallel connections lasts, at least
_ASKED = 8  # answers, after which the shortest time shows the distance and not how busy this machine is


class Line:
    """The line of one client. Everything that it sends and fetches goes over it; transfers are limited to `max_up` and
    `max_down` bits per second. `clock` gives seconds. Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_up: float | None = None,
        max_down: float | None = None,
    ) -> None:
        self._beginning = threading.Lock()
        self.is_far = False  # opening a connection takes long enough to be worth avoiding
        self.connections = Connections(self._opened)
        unacknowledged = self.connections.unacknowledged_bytes
        full = self.connections.is_queueing
        self.up = Direction(
            "send",
            ParallelConnections(*UP),
            PART_BYTES,
            RateLimit(max_up, clock),
            clock=clock,
            unacknowledged=unacknowledged,
            full=full,
        )
        self.down = Direction("fetch", ParallelConnections(*DOWN), PART_BYTES, RateLimit(max_down, clock), clock=clock)
        self.stalls = StallWatch(
            self.connections,
            lambda: self.up.meter.moved_bytes + self.down.meter.moved_bytes,
            lambda: self.down.meter.active > 0,
        )
        self.round_trip_s: float | None = None  # the shortest one seen, including the coordinator's own time
        self._answers = 0

    def answered(self, seconds: float) -> None:
        """Note that a small request was answered after `seconds`."""
        self.round_trip_s = seconds if self.round_trip_s is None else min(self.round_trip_s, seconds)
        self._answers += 1
        for direction in (self.up, self.down):
            direction.meter.window_s = max(WINDOW_S, _ROUND_TRIPS * self.round_trip_s)
        if self._answers >= _ASKED and self.round_trip_s >= FAR_S:
            self._set_far()

    def _opened(self, round_trip_s: float) -> None:
        """Note that a connection was opened to the coordinator or to a proxy: the coordinator is at least this far
        away."""
        if round_trip_s >= FAR_S:
            self._set_far()

    def _set_far(self) -> None:
        with self._beginning:
            begins, self.is_far = not self.is_far, True
        if begins and self.connections.congestion_control != BBR:  # with BBR, one connection fills the line
            self.connections.unsent_bytes = UNSENT_FAR_BYTES
            self.up.set_far(UP_FAR, UP_FAR_BYTES)
            self.down.set_far(DOWN_FAR, DOWN_FAR_BYTES)
