"""Receiving a payload: streamed into a file and hashed on the way, whatever its size, in bounded memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from coordinator.pieces import Pieces
from coordinator.service import Coordinator
from protocol.digest import parse_content_digest
from protocol.errors import Problem


class Upload:
    """A body on its way into a new file. `size` and `digest` are what was announced.

    It is written and hashed on threads, for a busy disk takes its time, and heartbeats are answered on the event loop.
    """

    def __init__(self, path: Path, size: int, digest: bytes, transfer: ExitStack) -> None:
        self.path, self.size, self.digest = path, size, digest
        self._transfer = transfer  # ends when nothing of the body is in memory any more
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        self._arrived: list[bytes] = []
        self._arrived_bytes = 0

    async def receive(self, request: Request, idle_s: float, pieces: Pieces) -> None:
        """All of the body; of what lies in memory `pieces` says how much it may be."""
        received_bytes, body = 0, request.stream()
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    piece = await anext(body, None)
            except TimeoutError:
                raise Problem("request-timeout", f"nothing arrived for {idle_s:.0f} s; send it again") from None
            if piece is None:
                break
            received_bytes += len(piece)
            self._arrived_bytes += len(piece)
            self._arrived.append(piece)
            if self._arrived_bytes >= pieces.bytes:
                await run_in_threadpool(self._write)
        if received_bytes != self.size:
            raise Problem("digest-mismatch", f"{received_bytes} bytes arrived, announced were {self.size}")

    def _write(self) -> None:
        if self._file is None:
            self._file = self.path.open("xb")
        for piece in self._arrived:
            self._file.write(piece)
            self._hasher.update(piece)
        self._arrived, self._arrived_bytes = [], 0

    def complete(self) -> None:
        """Write what is still in memory: on the thread that goes on with the file, to spare a hand-over to another one.

        Raises Problem: digest-mismatch.
        """
        self._write()
        assert self._file is not None
        self._file.close()
        self._transfer.close()
        digest = self._hasher.digest()
        if digest != self.digest:
            raise Problem("digest-mismatch", f"the body's digest is {digest.hex()}, announced was {self.digest.hex()}")

    def discard(self) -> None:
        """Delete the file, unless it was renamed."""
        self._transfer.close()
        if self._file is not None:
            try:
                self._file.close()
            finally:
                self.path.unlink(missing_ok=True)


@asynccontextmanager
async def received(request: Request, service: Coordinator, max_bytes: int) -> AsyncIterator[Upload]:
    """The request's body, once all of it has arrived: `complete` it first. It is gone when the block ends.

    Raises Problem: length-required, payload-too-large, invalid-message (no digest), digest-mismatch, request-timeout.
    """
    size, announced = _announced(request, max_bytes)
    with ExitStack() as transfer:
        transfer.enter_context(service.pieces.transfer())
        upload = Upload(service.data.incoming(), size, announced, transfer)
        try:
            await upload.receive(request, service.settings.upload_idle_s, service.pieces)
            yield upload
        finally:
            upload.discard()


def _announced(request: Request, max_bytes: int) -> tuple[int, bytes]:
    length = request.headers.get("content-length")
    if length is None or not length.isdigit():
        raise Problem("length-required", "an upload needs a Content-Length")
    if int(length) > max_bytes:
        raise Problem("payload-too-large", f"the body has {length} bytes; at most {max_bytes} are taken here")
    try:
        digest = parse_content_digest(request.headers.get("content-digest", ""))
    except ValueError as error:
        raise Problem("invalid-message", str(error)) from error
    if digest is None:
        raise Problem("invalid-message", "an upload needs a Content-Digest header: blake3=:BASE64:")
    return int(length), digest
