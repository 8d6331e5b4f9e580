"""The upload line: the bodies of uploads go over it one after the other, however many threads have one.

Side by side they would share the line and arrive together, late. In order, every worker's first fragment arrives first,
so that its delta comes down while the others still go up.

How fast the line takes them is measured, for the choice whether they are coded (worker/tuning/entropy.py).

A body counts as sent when the kernel has taken it. On a slow line that would be seconds too early, for a socket buffers
megabytes, and those share the line with the next body. So connections are told to buffer little.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from worker.tuning.entropy import Rate

# Less than this fits into buffers on the way at once, however slow the line: its time says nothing.
LEAST_MEASURED_BYTES = 1 << 20
UNSENT_BYTES = 1 << 17  # 0.1 s at 10 Mbit/s; loopback is as fast with it as without


def watch(request: httpx.Request) -> None:
    """Limit the unsent bytes in the socket of a new connection to UNSENT_BYTES, as one of httpx's `event_hooks`.

    (As an option of a transport it would make httpx ignore the environment's proxies.)
    """
    request.extensions["trace"] = _limit_unsent


def _limit_unsent(event: str, info: dict[str, Any]) -> None:
    if event.endswith("connect_tcp.complete"):
        opened = info["return_value"].get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class Line:
    """The line to one coordinator; `rate` is the bytes that it takes per second of `clock`. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self.rate = Rate()

    @contextmanager
    def taken(self, body: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
        """Yield `body`, to be sent while no other is. The line is free again after its last bytes, before the answer:
        so the next body is sent while the coordinator makes this one durable."""
        with ExitStack() as turn:
            self._lock.acquire()
            turn.callback(self._lock.release)

            def then_release() -> Iterator[bytes]:
                started, sent_bytes = self._clock(), 0
                for piece in body:
                    yield piece
                    sent_bytes += len(piece)
                if sent_bytes >= LEAST_MEASURED_BYTES:
                    self.rate.add(sent_bytes, self._clock() - started)
                turn.close()

            yield then_release()
