"""The connections to the coordinator: their socket options, what is in flight on them, and how dead ones end.

A body counts as sent once the kernel has accepted it. On a slow line that is seconds too early: a socket buffers
megabytes, which share the line with the next body. So each socket is set to buffer little.

A dead connection is noticed here, not by TCP. TCP doubles its timeout with every unacknowledged packet: after an outage
of half a minute it tries again half a minute later, and a connection that a router has forgotten stays dead for a
quarter of an hour. So if nothing has come through for SILENT_S while something is in flight, all connections are shut
down, and requests continue over new ones.
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
from functools import partial
from typing import Any, Literal

import httpcore

from outerstep.common.connections import congestion_text, probe_when_idle, set_congestion_control

UNSENT_BYTES = 1 << 17  # 0.1 s at 10 Mbit/s; loopback is as fast with it as without
UNSENT_FAR_BYTES = 1 << 14  # per connection, where there are many

QUEUED = 1.3

# The fields used of Linux's struct tcp_info: the state, one byte; a number of packets; and microseconds.
_STATE_AT, _UNACKED_AT, _RTT_AT, _MIN_RTT_AT = 0, 24, 68, 148
_ESTABLISHED = 1
_SIOCOUTQ = 0x5411  # Linux: bytes of a TCP socket that the peer has not acknowledged

httpcore.HTTP11Connection.READ_NUM_BYTES = 1 << 18  # at once; it costs a third less time per byte than 64 KiB

Pool = Literal["up", "down", "other"]  # uploads, downloads, all other requests

log = logging.getLogger(__name__)


class Connections:
    """The open connections of one client. `opened` is called with the round trip of each new one, in seconds.
    Pass `traced` as an httpx extension with each request. (A transport option would make httpx ignore the environment's
    proxies.) Thread-safe."""

    def __init__(self, opened: Callable[[float], object] = lambda round_trip_s: None) -> None:
        self._lock, self._note = threading.Lock(), opened
        self.unsent_bytes = UNSENT_BYTES  # for connections opened from now on
        self._open: weakref.WeakKeyDictionary[socket.socket, Pool] = weakref.WeakKeyDictionary()
        self.congestion_control: str | None = None  # of the newest connection, if the system reports it

    def traced(self, pool: Pool) -> dict[str, Any]:
        """Return the httpx extensions of a request that uses the connections of `pool`."""
        return {"trace": partial(self._trace, pool)}

    def _trace(self, pool: Pool, event: str, info: dict[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            opened = info["return_value"].get_extra_info("socket")
            if isinstance(opened, socket.socket):
                self._set_up(opened)
                if event.endswith(".connect_tcp.complete") and (round_trip_s := _round_trip_s(opened)) is not None:
                    self._note(round_trip_s)
                with self._lock:
                    self._open[opened] = pool

    def count(self, pool: Pool) -> int:
        """Return how many connections of a pool are open at both ends, as far as the kernel knows."""
        with self._lock:
            found = [each for each, its in self._open.items() if its == pool and each.fileno() >= 0]
        return sum((info := _tcp_info(each)) is None or info[_STATE_AT] == _ESTABLISHED for each in found)

    def unacknowledged_bytes(self) -> int:
        """Return the bytes that the kernel has accepted and the peer has not acknowledged; 0 if the system cannot
        tell."""
        return sum(_unacknowledged(each) for each in self._open_sockets())

    def is_queueing(self) -> bool:
        """Return True if most packets in flight wait in a queue in front of the line, which is then full: their round
        trips take longer than the shortest one seen. False if the system cannot tell."""
        found = [info for each in self._open_sockets() if (info := _tcp_info(each)) is not None]
        newest = [_number(info, _RTT_AT) for info in found if _number(info, _UNACKED_AT)]
        shortest = [_number(info, _MIN_RTT_AT) for info in found]
        return bool(newest) and statistics.median(newest) >= QUEUED * min(shortest)

    def abort(self) -> None:
        """Shut down all connections, so that every thread waiting on one fails at once."""
        for each in self._open_sockets():
            # Through a duplicate socket: the TLS state belongs to the thread that uses the connection. OSError if it
            # was closed meanwhile.
            with suppress(OSError), socket.socket(fileno=os.dup(each.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)

    def _open_sockets(self) -> list[socket.socket]:
        with self._lock:
            return [each for each in self._open if each.fileno() >= 0]

    def _set_up(self, opened: socket.socket) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self.unsent_bytes)
        probe_when_idle(opened)
        used = set_congestion_control(opened)
        if used != self.congestion_control:
            self.congestion_control = used
            log.info("TCP's congestion control: %s", congestion_text(used))


def _round_trip_s(connection: socket.socket) -> float | None:
    """Return the round trip of the connection's handshake as the kernel measured it, seconds; None if it is unknown."""
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


class StallWatch:
    """Aborts all connections when nothing comes through while something is in flight. `moved` counts all bytes sent and
    received; `receiving` is True in the middle of an answer's body."""

    def __init__(self, connections: Connections, moved: Callable[[], int], receiving: Callable[[], bool]) -> None:
        self._connections, self._moved, self._receiving = connections, moved, receiving
        self._lock = threading.Lock()
        self._active = 0
        self._watching = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the line while the block runs."""
        with self._lock:
            self._active += 1
            begins, self._watching = not self._watching, True
        if begins:
            threading.Thread(target=self._watch, name="stalls", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1

    def _watch(self) -> None:
        ticking, silent_s = threading.Event(), 0.0  # never set: used to sleep
        seen = self._state()
        while True:
            ticking.wait(LOOKS_S)
            with self._lock:
                self._watching = self._active > 0
                if not self._watching:
                    return
            before, seen = seen, self._state()
            due = seen[1] > 0 or self._receiving()
            silent_s = silent_s + LOOKS_S if seen == before and due else 0.0
            if silent_s >= SILENT_S:
                log.warning("nothing has come through for %.0f s: continuing over new connections", silent_s)
                self._connections.abort()
                silent_s = 0.0

    def _state(self) -> tuple[int, int]:
        return self._moved(), self._connections.unacknowledged_bytes()
