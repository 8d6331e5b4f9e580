"""The payloads in memory: contributions from their first byte until they are averaged, and the newest deltas, which all
workers fetch within moments of their publication.

A payload in memory need not be read from its file to be checked, averaged, stepped by or sent. All others are read from
their files: so memory is bounded, however many workers there are and however slow they are. Contributions and deltas
share the bound, so that it is the same for two workers as for thirty.
"""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

from outerstep.common.files import aligned

CONTRIBUTIONS_BYTES = 96 << 20
DELTAS_BYTES = 24 << 20
# On fast lines fragments are averaged one soon after the other, and free memory at shorter intervals than this. On slow
# ones they do so now and then, and hardly any body begins to arrive so soon after it.
FREES_UP_WITHIN_S = 0.3


class Room:
    """A bound on the bytes of payloads in memory. Deltas have their own, and what contributions leave free of theirs.

    Thread-safe. `clock` gives seconds.
    """

    def __init__(
        self,
        contributions_bytes: int = CONTRIBUTIONS_BYTES,
        deltas_bytes: int = DELTAS_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.contributions_bytes, self._deltas_own_bytes = contributions_bytes, deltas_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._free_bytes = contributions_bytes
        self._freed_at = -FREES_UP_WITHIN_S
        self._given_back: deque[int] = deque()  # by finalizers, which must not wait for a lock
        self._deltas: OrderedDict[bytes, memoryview] = OrderedDict()  # by digest, the oldest first
        self._deltas_bytes = 0

    def take(self, size: int) -> memoryview | None:
        """Return memory for a contribution of `size` bytes; None if there is no room.

        It is free again as soon as nothing refers to it.
        """
        with self._lock:
            self._take_back()
            if size > self._free_bytes:
                return None
            self._free_bytes -= size
            self._let_deltas_go()
        memory = aligned(size)
        weakref.finalize(memory.obj, self._given_back.append, size).atexit = False
        return memory

    def frees_up(self, size: int) -> bool:
        """Return True if there may soon be room for `size` bytes: some memory was freed just now."""
        return size <= self.contributions_bytes and self._clock() - self._freed_at < FREES_UP_WITHIN_S

    def add_delta(self, digest: bytes, delta: memoryview) -> None:
        """Hold `delta`, whose BLAKE3 digest is `digest`, until a newer one or contributions need its memory."""
        with self._lock:
            if digest in self._deltas:
                return
            self._deltas[digest] = delta
            self._deltas_bytes += len(delta)
            self._take_back()
            self._let_deltas_go()

    def delta(self, digest: bytes) -> memoryview | None:
        """Return the delta of this digest if it is still in memory, else None."""
        with self._lock:
            return self._deltas.get(digest)

    def _take_back(self) -> None:
        while self._given_back:
            self._free_bytes += self._given_back.popleft()
            self._freed_at = self._clock()

    def _let_deltas_go(self) -> None:
        while self._deltas_bytes > self._deltas_own_bytes + self._free_bytes:
            _, oldest = self._deltas.popitem(last=False)
            self._deltas_bytes -= len(oldest)
