"""The connections to the coordinator: what each new one is told, what is on its way over all of them, and their end.

A body counts as sent when the kernel has taken it. On a slow line that would be seconds too early, for a socket buffers
megabytes, and those share the line with the next body. So connections are told to buffer little.

The end of connections over which nothing comes through any more.

TCP itself doubles its patience with every packet that is not acknowledged: after an outage of half a minute it tries
again half a minute later, and a connection that a router has forgotten is dead for a quarter of an hour. So once the
whole line has been silent for SILENT_S, though something is on its way, all connections are broken, and what was on
them is sent and asked for over new ones.
"""

import fcntl
import logging
import os
import socket
import statistics
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from outerstep.common.connections import set_congestion_control

UNSENT_BYTES = 1 << 17  # 0.1 s at 10 Mbit/s; loopback is as fast with it as without
UNSENT_FAR_BYTES = 1 << 14  # of each of many connections

QUEUED = 1.3

# Linux's struct tcp_info, as far as it is looked at: packets, and microseconds.
_UNACKED_AT, _RTT_AT, _MIN_RTT_AT = 24, 68, 148
_SIOCOUTQ = 0x5411  # Linux: the bytes of a TCP socket that the other side has not acknowledged

log = logging.getLogger(__name__)


class Connections:
    """The open connections of one client; `opened` is called with the round trip of each new one, in seconds. `trace`
    is an httpx extension, to be given with each request. (As an option of a transport it would make httpx ignore the
    environment's proxies.) Thread-safe."""

    def __init__(self, opened: Callable[[float], object] = lambda round_trip_s: None) -> None:
        self._lock, self._note = threading.Lock(), opened
        self.unsent_bytes = UNSENT_BYTES  # of connections that are opened from now on
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.congestion_control: str | None = None  # of the newest connection, where the system tells

    def trace(self, event: str, info: dict[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            opened = info["return_value"].get_extra_info("socket")
            if isinstance(opened, socket.socket):
                self._tell(opened)
                if event.endswith(".connect_tcp.complete") and (round_trip_s := _round_trip_s(opened)) is not None:
                    self._note(round_trip_s)
                with self._lock:
                    self._open.add(opened)

    def unacknowledged_bytes(self) -> int:
        """Return how much the kernel has taken and the other side not acknowledged; 0 where the system cannot tell."""
        return sum(_unacknowledged(each) for each in self._living())

    def queues(self) -> bool:
        """Return True if most of what is on its way waits in a queue before the line: its round trips take longer than
        the shortest that there were. Then the line is full. False where the system cannot tell."""
        found = [info for each in self._living() if (info := _tcp_info(each)) is not None]
        newest = [_number(info, _RTT_AT) for info in found if _number(info, _UNACKED_AT)]
        shortest = [_number(info, _MIN_RTT_AT) for info in found]
        return bool(newest) and statistics.median(newest) >= QUEUED * min(shortest)

    def abort(self) -> None:
        """Break all connections, so that whoever waits for one fails at once."""
        for each in self._living():
            # By a socket of its own: what TLS keeps of the connection is its user's, on another thread. OSError where
            # it was closed meanwhile.
            with suppress(OSError), socket.socket(fileno=os.dup(each.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)

    def _living(self) -> list[socket.socket]:
        with self._lock:
            return [each for each in self._open if each.fileno() >= 0]

    def _tell(self, opened: socket.socket) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self.unsent_bytes)
        used = set_congestion_control(opened)
        if used != self.congestion_control:
            self.congestion_control = used
            log.info("TCP's congestion control: %s", used)


def _round_trip_s(connection: socket.socket) -> float | None:
    """Return the round trip of a connection's handshake, as the kernel measured it; None where it does not tell."""
    info = _tcp_info(connection)
    return None if info is None else _number(info, _RTT_AT) / 1e6


def _number(info: bytes, at: int) -> int:
    return int(struct.unpack_from("I", info, at)[0])


def _tcp_info(connection: socket.socket) -> bytes | None:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    except (OSError, AttributeError):  # closed meanwhile, or another system
        return None
    return info if len(info) == _MIN_RTT_AT + 4 else None


def _unacknowledged(connection: socket.socket) -> int:
    try:
        return int(struct.unpack("i", fcntl.ioctl(connection.fileno(), _SIOCOUTQ, b"\0\0\0\0"))[0])
    except (OSError, ValueError):  # closed meanwhile, or another system
        return 0


SILENT_S = 4.0
LOOKS_S = 1.0


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
