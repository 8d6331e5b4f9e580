"""The line up: the bodies of uploads go over it one after the other, however many threads have one.

Side by side they would share the line and arrive together, late. In order, every worker's first fragment arrives first,
so that its delta comes down while the others still go up.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


class Line:
    """One per coordinator. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, body: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
        """`body`, to be sent while nobody else sends one. The line is free again after its last piece, though the
        answer is still to come: so nothing stands still while the coordinator makes the upload durable."""
        with ExitStack() as turn:
            self._lock.acquire()
            turn.callback(self._lock.release)

            def pieces() -> Iterator[bytes]:
                yield from body
                turn.close()

            yield pieces()
