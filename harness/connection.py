"""A connection that speaks HTTP/1.1 by hand, for crowds of clients: an HTTP library would cost more than the
coordinator."""

import asyncio
import re
import time
from collections.abc import AsyncIterator


class Connection:
    """One keep-alive connection to a coordinator on this machine."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", *headers: str) -> tuple[int, bytes, float]:
        """Send a request. Return status, body, and the seconds that it took."""
        asked = time.perf_counter()
        reader = await self._send(method, path, body, *headers)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        content = await reader.readexactly(int(length[1])) if length else b""
        return int(head[9:12]), content, time.perf_counter() - asked

    async def lines(self, path: str, *headers: str) -> AsyncIterator[bytes]:
        """Yield the lines of an answer that goes on and on, those that only say how long its pieces are among them.
        Raises RuntimeError for a refusal."""
        reader = await self._send("GET", path, b"", *headers)
        head = await reader.readuntil(b"\r\n\r\n")
        if head[9:12] != b"200":
            raise RuntimeError(f"{path}: {head.decode()}")
        while line := await reader.readline():
            yield line

    async def _send(self, method: str, path: str, body: bytes, *headers: str) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: coordinator",
            f"Authorization: Bearer {self._token}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *headers,
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return reader
