"""The newest deltas in memory: all workers fetch them within moments of their publication.

Kept by digest, so what is found here is what was asked for. A file is read only by whoever comes later, or goes on in
the middle.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from protocol.digest import Buffer

MAX_BYTES = 48 << 20


class Recent:
    """At most `max_bytes` of immutable blobs; the oldest go first. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blobs: OrderedDict[bytes, Sequence[Buffer]] = OrderedDict()
        self._bytes = 0

    def keep(self, digest: bytes, blob: Sequence[Buffer]) -> None:
        """Keep `blob`, whose BLAKE3 digest is `digest`, given in pieces."""
        with self._lock:
            if digest in self._blobs:
                return
            self._blobs[digest] = blob
            self._bytes += _size(blob)
            while self._bytes > self._max_bytes:
                _, oldest = self._blobs.popitem(last=False)
                self._bytes -= _size(oldest)

    def get(self, digest: bytes) -> Sequence[Buffer] | None:
        with self._lock:
            return self._blobs.get(digest)


def _size(blob: Sequence[Buffer]) -> int:
    return sum(len(piece) for piece in blob)
