"""The grace: the time that a worker which is asked to stop has for handing in the work that it has done.

Containers have 10 s from SIGTERM to SIGKILL, and an inner step, leaving and the end of the process need some of them.
"""

import threading
import time
from collections.abc import Callable

HAND_IN_S = 5.0


class Grace:
    """A `Signal` (retry.py) that is set HAND_IN_S after `stop` was first seen set, or after `begin`. Thread-safe."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        self._stop, self._clock = stop, clock
        self._lock = threading.Lock()
        self._over_at: float | None = None

    def begin(self) -> None:
        """Begin the grace, if it has not begun."""
        with self._lock:
            if self._over_at is None:
                self._over_at = self._clock() + HAND_IN_S

    def is_set(self) -> bool:
        if self._stop.is_set():
            self.begin()
        return self._over_at is not None and self._clock() >= self._over_at

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds, less if `stop` is set meanwhile. Return `is_set()`."""
        if not self.is_set():
            if self._over_at is None:
                self._stop.wait(timeout)
            else:
                time.sleep(max(min(timeout, self._over_at - self._clock()), 0.0))
        return self.is_set()
