"""Receiving a payload: streamed into a file and hashed on the way, whatever its size, in bounded memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from coordinator.pieces import Pieces
from coordinator.service import Coordinator
from protocol.digest import parse_content_digest
from protocol.errors import Problem


@dataclass(frozen=True)
class Upload:
    """A received body: complete, with the announced length and digest."""

    path: Path
    size: int
    digest: bytes


@asynccontextmanager
async def received(request: Request, service: Coordinator, max_bytes: int) -> AsyncIterator[Upload]:
    """The request's body in a temporary file, which is gone when the block ends (unless it was renamed).

    Raises Problem: length-required, payload-too-large, invalid-message (no digest), digest-mismatch, request-timeout.
    """
    size, announced = _announced(request, max_bytes)
    path = service.data.incoming()
    try:
        with await run_in_threadpool(_new_file, path) as file, service.pieces.transfer():
            digest = await _stream_to(file, request, size, service.settings.upload_idle_s, service.pieces)
        if digest != announced:
            raise Problem("digest-mismatch", f"the body's digest is {digest.hex()}, announced was {announced.hex()}")
        yield Upload(path, size, digest)
    finally:
        path.unlink(missing_ok=True)


def _new_file(path: Path) -> BinaryIO:
    """On a thread: a busy disk takes its time for a new name, and heartbeats are answered on the event loop."""
    return path.open("xb")


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


async def _stream_to(file: BinaryIO, request: Request, size: int, idle_s: float, pieces: Pieces) -> bytes:
    """Write and hash the body on a thread, as much of it at a time as `pieces` says."""
    hasher, pending, pending_bytes, received_bytes = blake3(), list[bytes](), 0, 0

    def write(arrived: list[bytes]) -> None:
        for each in arrived:
            file.write(each)
            hasher.update(each)

    body = request.stream()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                piece = await anext(body, None)
        except TimeoutError:
            raise Problem("request-timeout", f"nothing arrived for {idle_s:.0f} s; send it again") from None
        if piece is None:
            break
        received_bytes += len(piece)
        pending_bytes += len(piece)
        pending.append(piece)
        if pending_bytes >= pieces.bytes:
            await run_in_threadpool(write, pending)
            pending, pending_bytes = [], 0
    await run_in_threadpool(write, pending)
    if received_bytes != size:
        raise Problem("digest-mismatch", f"{received_bytes} bytes arrived, announced were {size}")
    return hasher.digest()
