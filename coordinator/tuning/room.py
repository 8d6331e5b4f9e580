"""What the coordinator has in memory of payloads: contributions from their first byte until they are averaged, and the
newest deltas, which all workers fetch within moments of their publication.

What is there is not read again to be checked, averaged, stepped by or sent. What finds no room, or was there once, has
its file: so memory is bounded, however many workers there are and however slow they are. Contributions and deltas share
the bound, so that it is the same for two workers as for thirty.
"""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

from protocol.direct import aligned

CONTRIBUTIONS_BYTES = 96 << 20
DELTAS_BYTES = 24 << 20
# On fast lines fragments are averaged one after the other, and give their room back in shorter intervals. On slow ones
# they do so now and then, and hardly any body comes within this time.
FREES_UP_WITHIN_S = 0.3


class Room:
    """At most so many bytes of contributions at a time; deltas have their own, and what contributions leave free.

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
        self._given_back: deque[int] = deque()  # from wherever the last reference went: no place to wait for a lock
        self._deltas: OrderedDict[bytes, memoryview] = OrderedDict()  # by digest, the oldest first
        self._deltas_bytes = 0

    def take(self, size: int) -> memoryview | None:
        """Memory for a contribution of `size` bytes, where there is room for it; free again once nothing refers to it
        any more."""
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
        """Whether there may soon be room for `size` bytes: some has been given back just now."""
        return size <= self.contributions_bytes and self._clock() - self._freed_at < FREES_UP_WITHIN_S

    def add_delta(self, digest: bytes, delta: memoryview) -> None:
        """Keep `delta`, whose BLAKE3 digest is `digest`, for as long as there is room and no newer one."""
        with self._lock:
            if digest in self._deltas:
                return
            self._deltas[digest] = delta
            self._deltas_bytes += len(delta)
            self._take_back()
            self._let_deltas_go()

    def delta(self, digest: bytes) -> memoryview | None:
        """The delta of this digest, where it is in memory still."""
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
