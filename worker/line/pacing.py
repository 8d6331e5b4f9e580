"""A rate that one way of the line is held to, so that the box's other traffic has the rest."""

import threading
from collections.abc import Callable

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
