"""The newest deltas in memory: all workers fetch them within moments of their publication.

Kept by digest, so what is found here is what was asked for. A file is read only by whoever comes later, or goes on in
the middle.
"""

import threading
from collections import OrderedDict

MAX_BYTES = 48 << 20


class Recent:
    """At most `max_bytes` of immutable blobs; the oldest go first. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blobs: OrderedDict[bytes, memoryview] = OrderedDict()
        self._bytes = 0

    def keep(self, digest: bytes, blob: memoryview) -> None:
        """Keep `blob`, whose BLAKE3 digest is `digest`."""
        with self._lock:
            if digest in self._blobs:
                return
            self._blobs[digest] = blob
            self._bytes += len(blob)
            while self._bytes > self._max_bytes:
                _, oldest = self._blobs.popitem(last=False)
                self._bytes -= len(oldest)

    def get(self, digest: bytes) -> memoryview | None:
        with self._lock:
            return self._blobs.get(digest)
