"""The receiving of payloads of any size in bounded memory: into memory if there is room, and otherwise into a file."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from coordinator.service import Coordinator
from coordinator.store.payloads import Body
from coordinator.tuning.room import Room
from protocol.digest import parse_content_digest
from protocol.errors import Problem

PIECE_BYTES = 1 << 18  # of a body that goes into a file: so much is in memory at once
POLL_S = 0.01  # between two attempts to get memory


class Upload(ABC):
    """A body that is being received. `size` and `digest` are those announced."""

    def __init__(self, size: int, digest: bytes) -> None:
        self._size, self._digest = size, digest

    async def receive(self, request: Request, idle_s: float) -> None:
        """Receive all of the body. Raises Problem: request-timeout, digest-mismatch (if its length is another)."""
        received_bytes = 0
        try:
            async for piece in pieces(request, idle_s):
                received_bytes += len(piece)
                if received_bytes > self._size:
                    break
                await self._add(piece)
        except TimeoutError:
            raise Problem("request-timeout", f"nothing arrived for {idle_s:.0f} s; send it again") from None
        if received_bytes != self._size:
            raise Problem("digest-mismatch", f"{received_bytes} bytes arrived, announced were {self._size}")

    def complete(self) -> Body:
        """Return what has arrived. Raises Problem: digest-mismatch.

        To be called on the thread that goes on with it, which spares a hand-over to another one.
        """
        source, digest = self._end()
        if digest != self._digest:
            raise Problem("digest-mismatch", f"the body's digest is {digest.hex()}, announced was {self._digest.hex()}")
        return Body(source, self._size, digest)

    @abstractmethod
    async def _add(self, piece: bytes) -> None:
        """Take the next bytes of the body."""

    @abstractmethod
    def _end(self) -> tuple[memoryview | Path, bytes]:
        """Return what arrived, and its BLAKE3 digest."""

    @abstractmethod
    def discard(self) -> None:
        """Free what it has; called at the end in any case."""


class InMemory(Upload):
    """An upload that is received into `content`, memory for all of it."""

    def __init__(self, size: int, digest: bytes, content: memoryview) -> None:
        super().__init__(size, digest)
        self._content = content
        self._received_bytes = 0

    async def _add(self, piece: bytes) -> None:
        start, self._received_bytes = self._received_bytes, self._received_bytes + len(piece)
        self._content[start : self._received_bytes] = piece

    def _end(self) -> tuple[memoryview, bytes]:
        return self._content, blake3(self._content).digest()

    def discard(self) -> None:
        """Do nothing: its memory is free again as soon as nothing refers to it."""


class ThroughFile(Upload):
    """An upload that is written to the new file `path` and hashed piece by piece.

    That is done on threads: a busy disk takes its time, and the event loop has heartbeats to answer.
    """

    def __init__(self, size: int, digest: bytes, path: Path) -> None:
        super().__init__(size, digest)
        self._path = path
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        self._arrived: list[bytes] = []
        self._arrived_bytes = 0  # in that list

    async def _add(self, piece: bytes) -> None:
        self._arrived_bytes += len(piece)
        self._arrived.append(piece)
        if self._arrived_bytes >= PIECE_BYTES:
            await run_in_threadpool(self._write)

    def _write(self) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        for piece in self._arrived:
            self._file.write(piece)
            self._hasher.update(piece)
        self._arrived, self._arrived_bytes = [], 0

    def _end(self) -> tuple[Path, bytes]:
        self._write()
        assert self._file is not None
        self._file.close()
        return self._path, self._hasher.digest()

    def discard(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self._path.unlink(missing_ok=True)


async def pieces(request: Request, idle_s: float) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises TimeoutError if nothing arrives for `idle_s`."""
    body = request.stream()
    while True:
        async with asyncio.timeout(idle_s):
            piece = await anext(body, None)
        if not piece:
            return
        yield piece


@asynccontextmanager
async def received(
    request: Request, service: Coordinator, max_bytes: int, room: Room | None = None
) -> AsyncIterator[Upload]:
    """Receive the request's body, into memory if `room` has some; then give it to the block, which `complete`s it.

    A file of it is deleted at the end of the block. Raises Problem: length-required, payload-too-large, invalid-message
    (no digest), digest-mismatch, request-timeout.
    """
    size, announced = _announced(request, max_bytes)
    content = None if room is None else await _take(room, size)
    upload: Upload = (
        ThroughFile(size, announced, service.data.scratch()) if content is None else InMemory(size, announced, content)
    )
    try:
        await upload.receive(request, service.settings.upload_idle_s)
        yield upload
    finally:
        upload.discard()


async def _take(room: Room, size: int) -> memoryview | None:
    """Return memory for a body, or None. While others are freeing theirs, waiting for it costs less than going through
    a file."""
    content = room.take(size)
    while content is None and room.frees_up(size):
        await asyncio.sleep(POLL_S)
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
