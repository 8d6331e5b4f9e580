"""The sizes of the pieces in which bodies are received and sent: all transfers under way share one bound on memory.

Every piece costs a hand-over between the event loop and a thread, so a few transfers move in large pieces; many move in
small ones, so that the memory does not grow with the number of workers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHARED_BYTES = 8 << 20
LARGEST_BYTES = 1 << 20
SMALLEST_BYTES = 1 << 16


class PieceSizes:
    """The sizes of the pieces of one server's transfers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers = 0

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Count one more transfer while the block runs."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, transfers: int) -> None:
        with self._lock:
            self._transfers += transfers

    @property
    def bytes(self) -> int:
        """How many bytes one transfer may hold in memory now."""
        return max(SMALLEST_BYTES, min(LARGEST_BYTES, SHARED_BYTES // max(1, self._transfers)))
