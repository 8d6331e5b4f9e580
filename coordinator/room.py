"""Room in memory for contributions: from their first byte until they are averaged.

What is there is neither read again to be checked nor to be averaged. What finds no room goes through its file instead,
in pieces: so memory is bounded, however many workers there are and however slow they are.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from coordinator.direct import aligned

ROOM_BYTES = 48 << 20
# On fast lines fragments are averaged one after the other, and give their room back in shorter intervals. On slow ones
# they do so now and then, and hardly any body comes within this time.
FREES_UP_WITHIN_S = 0.3


class Room:
    """At most `max_bytes` at a time. Thread-safe. `clock` gives seconds."""

    def __init__(self, max_bytes: int = ROOM_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._free_bytes = max_bytes
        self._freed_at = -FREES_UP_WITHIN_S
        self._given_back: deque[int] = deque()  # from wherever the last reference went: no place to wait for a lock

    def take(self, size: int) -> memoryview | None:
        """Memory of `size` bytes, where there is room for it; free again once nothing refers to it any more."""
        with self._lock:
            while self._given_back:
                self._free_bytes += self._given_back.popleft()
                self._freed_at = self._clock()
            if size > self._free_bytes:
                return None
            self._free_bytes -= size
        memory = aligned(size)
        weakref.finalize(memory.obj, self._given_back.append, size).atexit = False
        return memory

    def frees_up(self, size: int) -> bool:
        """Whether there may soon be room for `size` bytes: some has been given back just now."""
        return size <= self.max_bytes and self._clock() - self._freed_at < FREES_UP_WITHIN_S
