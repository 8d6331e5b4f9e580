"""The line to the coordinator: its connections, and its two ways, up and down."""

import time
from collections.abc import Callable

from worker.link.connections import UNSENT_FAR_BYTES, Connections
from worker.link.meter import WINDOW_S
from worker.link.stalls import Stalls
from worker.link.way import Way
from worker.link.width import Width

UP = (1, 32)  # connections: the least and the most
DOWN = (4, 64)  # the deltas of four fragments are waited for at once
LEAST_UP_BYTES = 1 << 18  # of a part
LEAST_DOWN_BYTES = 1 << 16  # it comes after a silence, as fast as new windows open: many small ones are there first
FAR_S = 0.015  # a round trip from which on a line is begun with more connections than the least
UP_FAR, DOWN_FAR = 4, 32
_ROUND_TRIPS = 4  # of a measurement of the width, at least
_ASKED = 3  # times; the shortest counts


class Line:
    """The line of one client; all that it sends and fetches goes over it. `clock` gives seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.connections = Connections()
        underway = self.connections.unacknowledged_bytes
        self.up = Way("send", Width(*UP), LEAST_UP_BYTES, clock=clock, underway=underway)
        self.down = Way("fetch", Width(*DOWN), LEAST_DOWN_BYTES, clock=clock)
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
        if self._answers == _ASKED and self.is_far:
            self.connections.unsent_bytes = UNSENT_FAR_BYTES
            self.up.width.begin_with(UP_FAR)
            self.down.width.begin_with(DOWN_FAR)
        for way in (self.up, self.down):
            way.meter.window_s = max(WINDOW_S, _ROUND_TRIPS * self.round_trip_s)

    @property
    def is_far(self) -> bool:
        """True if opening a connection takes a time that is worth sparing."""
        return self.round_trip_s is not None and self.round_trip_s >= FAR_S
