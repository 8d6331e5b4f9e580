"""Receiving a payload, whatever its size, in bounded memory: in memory where there is room, or into a file."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from coordinator.bodies import Incoming
from coordinator.direct import write_new
from coordinator.files import Body
from coordinator.pieces import Pieces
from coordinator.room import Room
from coordinator.service import Coordinator
from protocol.digest import parse_content_digest
from protocol.errors import Problem

LOOK_S = 0.01  # between two looks for room


class Upload:
    """A body on its way into a new file. `size` and `digest` are what was announced, `content` memory for all of it.

    Without `content` it goes into its file piece by piece. It is written and hashed on threads, for a busy disk takes
    its time, and heartbeats are answered on the event loop.
    """

    def __init__(self, path: Path, size: int, digest: bytes, content: memoryview | None, pieces: Pieces) -> None:
        self._path, self._size, self._digest = path, size, digest
        self._content, self._pieces = content, pieces
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        self._arrived: list[bytes] = []
        self._arrived_bytes = 0  # of what is in the list
        self._transfer = ExitStack()  # ends when no piece of the body is in memory any more
        if content is None:
            self._transfer.enter_context(pieces.transfer())

    async def receive(self, request: Request, idle_s: float) -> None:
        """All of the body."""
        body, received_bytes = request.stream(), 0
        try:
            while piece := await self._next(body, idle_s):
                start, received_bytes = received_bytes, received_bytes + len(piece)
                if self._content is None:
                    await self._take(piece)
                elif received_bytes <= self._size:
                    self._content[start:received_bytes] = piece
                    incoming = Incoming.of(request.scope)
                    if incoming is not None:
                        received_bytes += await incoming.into(self._content[received_bytes:], idle_s)
                        break
        except TimeoutError:
            raise Problem("request-timeout", f"nothing arrived for {idle_s:.0f} s; send it again") from None
        if received_bytes != self._size:
            raise Problem("digest-mismatch", f"{received_bytes} bytes arrived, announced were {self._size}")

    async def _next(self, body: AsyncIterator[bytes], idle_s: float) -> bytes | None:
        async with asyncio.timeout(idle_s):
            return await anext(body, None)

    async def _take(self, piece: bytes) -> None:
        self._arrived_bytes += len(piece)
        self._arrived.append(piece)
        if self._arrived_bytes >= self._pieces.bytes:
            await run_in_threadpool(self._write)

    def _write(self) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        for piece in self._arrived:
            self._file.write(piece)
            self._hasher.update(piece)
        self._arrived, self._arrived_bytes = [], 0

    def complete(self) -> Body:
        """Write what is in memory: on the thread that goes on with the file, to spare a hand-over to another one.

        Raises Problem: digest-mismatch.
        """
        if self._content is None:
            self._write()
            assert self._file is not None
            self._file.close()
            self._transfer.close()
        else:
            self._hasher.update(self._content)
        digest = self._hasher.digest()
        if digest != self._digest:
            raise Problem("digest-mismatch", f"the body's digest is {digest.hex()}, announced was {self._digest.hex()}")
        if self._content is not None:
            write_new(self._path, self._content)
        return Body(self._path, self._size, digest, self._content)

    def discard(self) -> None:
        """Delete the file, unless it was renamed."""
        self._transfer.close()
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self._path.unlink(missing_ok=True)


@asynccontextmanager
async def received(
    request: Request, service: Coordinator, max_bytes: int, room: Room | None = None
) -> AsyncIterator[Upload]:
    """The request's body, once all of it has arrived: `complete` it first. Its file is gone when the block ends.

    In memory, if `room` has some for it. Raises Problem: length-required, payload-too-large, invalid-message (no
    digest), digest-mismatch, request-timeout.
    """
    size, announced = _announced(request, max_bytes)
    content = None if room is None else await _take(room, size)
    upload = Upload(service.data.incoming(), size, announced, content, service.pieces)
    try:
        await upload.receive(request, service.settings.upload_idle_s)
        yield upload
    finally:
        upload.discard()


async def _take(room: Room, size: int) -> memoryview | None:
    """Memory for a body, where there is any; while others give theirs back it is waited for, which costs less than the
    way through a file."""
    content = room.take(size)
    while content is None and room.frees_up(size):
        await asyncio.sleep(LOOK_S)
        content = room.take(size)
    return content


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
