"""The receiving of payloads of any size in bounded memory: into memory if there is room, and otherwise into a file."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from coordinator.service import Coordinator
from coordinator.store.files import Body
from coordinator.tuning.bodies import Incoming
from coordinator.tuning.pieces import PieceSizes
from coordinator.tuning.room import Room
from protocol.digest import parse_content_digest
from protocol.direct import write_new
from protocol.errors import Problem

POLL_S = 0.01  # between two attempts to get memory


class Upload(ABC):
    """A body that is being received into the new file `path`. `size` and `digest` are those announced."""

    def __init__(self, path: Path, size: int, digest: bytes) -> None:
        self._path, self._size, self._digest = path, size, digest

    async def receive(self, request: Request, idle_s: float) -> None:
        """Receive all of the body. Raises Problem: request-timeout, digest-mismatch (if its length is another)."""
        try:
            received_bytes = await self._receive(request, idle_s)
        except TimeoutError:
            raise Problem("request-timeout", f"nothing arrived for {idle_s:.0f} s; send it again") from None
        if received_bytes != self._size:
            raise Problem("digest-mismatch", f"{received_bytes} bytes arrived, announced were {self._size}")

    def complete(self) -> Body:
        """Finish the file and return what has arrived. Raises Problem: digest-mismatch.

        To be called on the thread that goes on with it, which spares a hand-over to another one.
        """
        digest = self._finish()
        if digest != self._digest:
            raise Problem("digest-mismatch", f"the body's digest is {digest.hex()}, announced was {self._digest.hex()}")
        return self._body()

    def discard(self) -> None:
        """Delete the file, unless it was renamed."""
        self._path.unlink(missing_ok=True)

    @abstractmethod
    async def _receive(self, request: Request, idle_s: float) -> int:
        """Receive the body and return its length; bytes beyond `size` may be lost. TimeoutError after `idle_s` without
        any."""

    @abstractmethod
    def _finish(self) -> bytes:
        """Return the BLAKE3 digest of what arrived."""

    @abstractmethod
    def _body(self) -> Body:
        """Return what arrived, once its digest is known to be right."""


class InMemory(Upload):
    """An upload that is received into `content`, memory for all of it, and written to its file at the end."""

    def __init__(self, path: Path, size: int, digest: bytes, content: memoryview) -> None:
        super().__init__(path, size, digest)
        self._content = content

    async def _receive(self, request: Request, idle_s: float) -> int:
        received_bytes = 0
        async for piece in _pieces(request, idle_s):
            start, received_bytes = received_bytes, received_bytes + len(piece)
            if received_bytes > self._size:
                break
            self._content[start:received_bytes] = piece
            incoming = Incoming.of(request.scope)
            if incoming is not None:
                return received_bytes + await incoming.into(self._content[received_bytes:], idle_s)
        return received_bytes

    def _finish(self) -> bytes:
        return blake3(self._content).digest()

    def _body(self) -> Body:
        write_new(self._path, self._content)
        return Body(self._path, self._size, self._digest, self._content)


class ThroughFile(Upload):
    """An upload that is written to its file and hashed piece by piece.

    That is done on threads: a busy disk takes its time, and the event loop has heartbeats to answer.
    """

    def __init__(self, path: Path, size: int, digest: bytes, piece_sizes: PieceSizes) -> None:
        super().__init__(path, size, digest)
        self._piece_sizes = piece_sizes
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        self._arrived: list[bytes] = []
        self._arrived_bytes = 0  # in that list
        self._transfer = ExitStack()  # ends when no piece of the body is in memory any more
        self._transfer.enter_context(piece_sizes.transfer())

    async def _receive(self, request: Request, idle_s: float) -> int:
        received_bytes = 0
        async for piece in _pieces(request, idle_s):
            received_bytes += len(piece)
            if received_bytes > self._size:
                break
            self._arrived_bytes += len(piece)
            self._arrived.append(piece)
            if self._arrived_bytes >= self._piece_sizes.bytes:
                await run_in_threadpool(self._write)
        return received_bytes

    def _write(self) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        for piece in self._arrived:
            self._file.write(piece)
            self._hasher.update(piece)
        self._arrived, self._arrived_bytes = [], 0

    def _finish(self) -> bytes:
        self._write()
        assert self._file is not None
        self._file.close()
        self._transfer.close()
        return self._hasher.digest()

    def _body(self) -> Body:
        return Body(self._path, self._size, self._digest, None)

    def discard(self) -> None:
        self._transfer.close()
        try:
            if self._file is not None:
                self._file.close()
        finally:
            super().discard()


async def _pieces(request: Request, idle_s: float) -> AsyncIterator[bytes]:
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

    Its file is deleted at the end of the block, unless it was renamed. Raises Problem: length-required,
    payload-too-large, invalid-message (no digest), digest-mismatch, request-timeout.
    """
    size, announced = _announced(request, max_bytes)
    content = None if room is None else await _take(room, size)
    path = service.data.incoming()
    upload: Upload = (
        ThroughFile(path, size, announced, service.piece_sizes)
        if content is None
        else InMemory(path, size, announced, content)
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
