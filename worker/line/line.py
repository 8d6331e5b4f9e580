"""The line to the coordinator: its connections, and its two ways, up and down."""

import threading
import time
from collections.abc import Callable

from outerstep.common import congestion
from worker.line.connections import UNSENT_FAR_BYTES, Connections
from worker.line.meter import WINDOW_S
from worker.line.pacing import Pace
from worker.line.stalls import Stalls
from worker.line.way import Way
from worker.line.width import Width

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
        if begins and self.connections.congestion_control != congestion.BBR:  # by which one connection fills it
            self.connections.unsent_bytes = UNSENT_FAR_BYTES
            self.up.begin_far(UP_FAR, UP_FAR_BYTES)
            self.down.begin_far(DOWN_FAR, DOWN_FAR_BYTES)
