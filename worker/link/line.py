"""The line to the coordinator: its connections, and its two ways, up and down."""

import time
from collections.abc import Callable

from worker.link.connections import Connections
from worker.link.stalls import Stalls
from worker.link.way import Way
from worker.link.width import Width

UP = (1, 32)  # connections: the least and the most
DOWN = (4, 64)  # each fragment's delta is waited for by requests of its own
FAR_S = 0.015  # a round trip from which on a line is begun with more connections than the least
_ASKED = 3  # times; the shortest counts


class Line:
    """The line of one client; all that it sends and fetches goes over it. `clock` gives seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.connections = Connections()
        self.up = Way("send", Width(*UP), clock=clock, underway=self.connections.unacknowledged_bytes)
        self.down = Way("fetch", Width(*DOWN), clock=clock)
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
            self.up.width.begin_far()
            self.down.width.begin_far()

    @property
    def is_far(self) -> bool:
        """True if opening a connection takes a time that is worth sparing."""
        return self.round_trip_s is not None and self.round_trip_s >= FAR_S
