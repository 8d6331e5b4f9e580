"""A slow line to a server on this machine: a TCP relay with a rate in each direction and a latency. Needs no root."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from benchmarks.harness.loop_thread import LoopThread

PIECE_BYTES = 1 << 14
# Loopback's own segments (64 KiB) and buffers take megabytes from a sender at once. A line does not.
SEGMENT_BYTES = 1460
RECEIVE_BYTES = 1 << 16
AT_ONCE_S = 0.001  # what is read sooner than this was there already


class _Way:
    """One direction of the line, shared by all connections."""

    def __init__(self, bits_per_second: float) -> None:
        self._rate = bits_per_second
        self._free_at = 0.0
        self.bytes = 0

    def book(self, now: float, size: int, *, waited: bool) -> float:
        """Return the time at which `size` bytes will have passed.

        Bytes that had `waited` follow right after those before them, even if a busy machine is late to carry them;
        others pass from now on.
        """
        self.bytes += size
        start = self._free_at if waited else max(self._free_at, now)
        self._free_at = start + 8 * size / self._rate
        return self._free_at


class SlowLine(LoopThread):
    """A relay of connections from `url` to 127.0.0.1:`port`, on a thread of its own. Rates are in bit/s, the latency is
    in seconds of a round trip; TCP's own bytes do not count. `up.bytes` and `down.bytes` have passed."""

    def __init__(self, port: int, *, up: float, down: float, latency_s: float) -> None:
        super().__init__()
        self._port, self._delay_s = port, latency_s / 2
        self.up, self.down = _Way(up), _Way(down)

    def __enter__(self) -> Self:
        super().__enter__()
        self.url = f"http://127.0.0.1:{self._listen(self._relay, sock=_listening(), limit=PIECE_BYTES)}"
        return self

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _closing(writer), _connected(self._port) as (far_reader, far_writer), asyncio.TaskGroup() as ways:
            ways.create_task(self._carry(reader, far_writer, self.up))
            ways.create_task(self._carry(far_reader, writer, self.down))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Way) -> None:
        """Carry bytes until the sender closes, then close the receiver's side too."""
        passed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(passed, writer))
            while True:
                asked_at = self._loop.time()
                piece = await reader.read(PIECE_BYTES)
                now = self._loop.time()
                at = way.book(now, len(piece), waited=now - asked_at < AT_ONCE_S)
                await self._until(at)
                passed.put_nowait((at + self._delay_s, piece))
                if not piece:
                    return

    async def _deliver(self, passed: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        while True:
            at, piece = await passed.get()
            await self._until(at)
            if not piece:
                writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()

    async def _until(self, at: float) -> None:
        left = at - self._loop.time()
        if left > 0:
            await asyncio.sleep(left)


def _listening() -> socket.socket:
    """Return a listening socket. Accepted ones inherit its options, which must be set before a connection begins."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    listening.bind(("127.0.0.1", 0))
    return listening


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.transport.abort()


@asynccontextmanager
async def _connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with _closing(writer):
        yield reader, writer
