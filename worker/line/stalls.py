"""The end of connections over which nothing comes through any more.

TCP itself doubles its patience with every packet that is not acknowledged: after an outage of half a minute it tries
again half a minute later, and a connection that a router has forgotten is dead for a quarter of an hour. So once the
whole line has been silent for SILENT_S, though something is on its way, all connections are broken, and what was on
them is sent and asked for over new ones.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.line.connections import Connections

SILENT_S = 4.0
LOOKS_S = 1.0

log = logging.getLogger(__name__)


class Stalls:
    """Looks after the line while something is on its way. `carried` counts all bytes that were sent or have arrived;
    `receiving` says whether an answer is in the middle of its body."""

    def __init__(self, connections: Connections, carried: Callable[[], int], receiving: Callable[[], bool]) -> None:
        self._connections, self._carried, self._receiving = connections, carried, receiving
        self._lock = threading.Lock()
        self._underway = 0
        self._looks = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Something is on its way in this block."""
        with self._lock:
            self._underway += 1
            begins, self._looks = not self._looks, True
        if begins:
            threading.Thread(target=self._look, name="stalls", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._underway -= 1

    def _look(self) -> None:
        ticking, silent_s = threading.Event(), 0.0  # never set: a way to wait
        seen = self._state()
        while True:
            ticking.wait(LOOKS_S)
            with self._lock:
                self._looks = self._underway > 0
                if not self._looks:
                    return
            before, seen = seen, self._state()
            due = seen[1] > 0 or self._receiving()
            silent_s = silent_s + LOOKS_S if seen == before and due else 0.0
            if silent_s >= SILENT_S:
                log.warning("nothing has come through for %.0f s: going on over new connections", silent_s)
                self._connections.abort()
                silent_s = 0.0

    def _state(self) -> tuple[int, int]:
        return self._carried(), self._connections.unacknowledged_bytes()
