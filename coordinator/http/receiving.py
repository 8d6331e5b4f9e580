"""The receiving of payloads of any size in bounded memory: into memory if there is room, and otherwise into a file.

A body is a payload, or with Content-Range one part of it.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator.http.arriving import pieces
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.assembling import Whole
from coordinator.store.data_directory import DataDirectory
from coordinator.store.payloads import Body, MemoryBudget
from protocol.digest import parse_content_digest
from protocol.errors import Problem, Remedy
from protocol.messages import PartReply

PIECE_BYTES = 1 << 18  # of a body that goes into a file: so much is in memory at once
POLL_S = 0.01  # between two attempts to get memory
ROUNDS = 4  # whose payloads a member may be sending at once: those of a broken connection are held for a while
MAX_TOLD = 100  # ranges that are missing, in one answer


@dataclass(frozen=True)
class Part:
    """Where a body belongs in its payload, and the BLAKE3 digest of that payload."""

    start: int
    total: int
    digest: bytes


class Upload(ABC):
    """A body that is being received. `size` and `digest` are those announced."""

    def __init__(self, size: int, digest: bytes) -> None:
        self._size, self._digest = size, digest

    async def receive(self, request: Request, settings: Settings) -> None:
        """Receive all of the body. Raises Problem: request-timeout, digest-mismatch (if its length is another)."""
        received_bytes = 0
        async for piece in pieces(request, settings):
            received_bytes += len(piece)
            if received_bytes > self._size:
                break
            await self._add(piece)
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
    """An upload that is written to a new file of the data directory and hashed piece by piece.

    That is done on threads: a busy disk takes its time, and the event loop has heartbeats to answer.
    """

    def __init__(self, size: int, digest: bytes, data: DataDirectory) -> None:
        super().__init__(size, digest)
        self._path, self._check_room = data.scratch(), data.check_room
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        self._arrived = bytearray()  # and no list: as objects, pieces of two bytes would be 28 times as large

    async def _add(self, piece: bytes) -> None:
        self._arrived += piece
        if len(self._arrived) >= PIECE_BYTES:
            await run_in_threadpool(self._write)

    def _write(self) -> None:
        self._check_room(len(self._arrived))
        if self._file is None:
            self._file = self._path.open("xb")
        self._file.write(self._arrived)
        self._hasher.update(self._arrived)
        self._arrived = bytearray()

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


class Received:
    """The body of a request, received. `part` is None where it is a whole payload. Set `over` where no other part of
    it is wanted."""

    def __init__(
        self, upload: Upload, data: DataDirectory, part: Part | None = None, whole: Whole | None = None
    ) -> None:
        self._upload, self._data, self._whole, self.part = upload, data, whole, part
        self.over = False

    def complete(self) -> Body | PartReply:
        """Return the payload, or what of it is still missing. Raises Problem: digest-mismatch, invalid-message.

        To be called on the thread that goes on with it, which spares a hand-over to another one.
        """
        body = self._upload.complete()
        if self.part is None or self._whole is None:
            return body
        if self._whole.in_file:
            self._data.check_room(body.size)
        missing = self._whole.add(self.part.start, body)
        self.over = not missing
        return PartReply(missing=missing[:MAX_TOLD]) if missing else self._whole.body()


@asynccontextmanager
async def received(
    request: Request, service: Coordinator, max_bytes: int, round_bytes: int, budget: MemoryBudget | None = None
) -> AsyncIterator[Received]:
    """Receive the request's body, into memory if `budget` allows it; then give it to the block, which `complete`s it.

    `round_bytes`: the size of all payloads that the member has to send for a round. At most ROUNDS times as many bytes
    may be arriving at once, and as many may be stored of payloads with missing parts.

    A file of it is deleted at the end of the block. Raises Problem: length-required, payload-too-large, invalid-message
    (no digest), digest-mismatch, request-timeout, too-many-requests.
    """
    size, announced, part = _announced(request, max_bytes)
    with service.callers.upload(_owner(request), size, ROUNDS * round_bytes):
        async with _received(request, service, size, announced, part, round_bytes, budget) as arrived:
            yield arrived


def _owner(request: Request) -> str:
    identity = request.state.identity
    return f"{identity.run} {identity.worker}"


@asynccontextmanager
async def _received(
    request: Request,
    service: Coordinator,
    size: int,
    announced: bytes,
    part: Part | None,
    round_bytes: int,
    budget: MemoryBudget | None,
) -> AsyncIterator[Received]:
    content = None if budget is None else await _take(budget, size)
    upload: Upload = (
        ThroughFile(size, announced, service.data) if content is None else InMemory(size, announced, content)
    )
    try:
        await upload.receive(request, service.settings)
        if part is None:
            yield Received(upload, service.data)
        else:
            with _of_whole(request, service, upload, part, round_bytes, budget) as arrived:
                yield arrived
    finally:
        upload.discard()


@contextmanager
def _of_whole(
    request: Request, service: Coordinator, upload: Upload, part: Part, round_bytes: int, budget: MemoryBudget | None
) -> Iterator[Received]:
    """Give the block a part of a payload; forget that payload where it was taken, or refused for good."""

    def target() -> memoryview | Path:
        memory = None if budget is None else budget.take(part.total)
        return service.data.scratch() if memory is None else memory

    key = _owner(request), request.url.path
    whole = service.wholes.get(key, part.total, part.digest, target, ROUNDS * round_bytes)
    arrived = Received(upload, service.data, part, whole)
    try:
        with whole.used():
            yield arrived
    except Problem as problem:
        arrived.over = whole.spoilt or problem.remedy is not Remedy.RETRY
        raise
    finally:
        if arrived.over:
            service.wholes.drop(key, whole)


def part_taken(reply: PartReply) -> Response:
    """Return the answer to a part of a payload that is not all there yet."""
    return Response(reply.model_dump_json(), HTTPStatus.ACCEPTED, media_type="application/json")


async def _take(budget: MemoryBudget, size: int) -> memoryview | None:
    """Return memory for a body, or None. While others are freeing theirs, waiting for it costs less than going through
    a file."""
    content = budget.take(size)
    while content is None and budget.frees_up(size):
        await asyncio.sleep(POLL_S)
        content = budget.take(size)
    return content


def _announced(request: Request, max_bytes: int) -> tuple[int, bytes, Part | None]:
    """Return the body's size and digest, and which part it is."""
    length = request.headers.get("content-length")
    if length is None or not length.isdigit():
        raise Problem("length-required", "an upload needs a Content-Length")
    if int(length) > max_bytes:
        raise Problem("payload-too-large", f"the body has {length} bytes; at most {max_bytes} are taken here")
    digest, place = _digest(request, "Content-Digest"), request.headers.get("content-range")
    return int(length), digest, None if place is None else _part(request, place, int(length), max_bytes)


def _part(request: Request, place: str, length: int, max_bytes: int) -> Part:
    match = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", place.strip())
    if match is None:
        raise Problem("invalid-message", f"Content-Range: {place[:100]} is not bytes FIRST-LAST/SIZE")
    first, last, total = (int(digits) for digits in match.groups())
    if not (first <= last < total and last - first + 1 == length):
        raise Problem("invalid-message", f"Content-Range: {place} does not fit a body of {length} bytes")
    if total > max_bytes:
        raise Problem("payload-too-large", f"the payload has {total} bytes; at most {max_bytes} are taken here")
    return Part(first, total, _digest(request, "Repr-Digest"))


def _digest(request: Request, name: str) -> bytes:
    try:
        digest = parse_content_digest(request.headers.get(name, ""))
    except ValueError as error:
        raise Problem("invalid-message", f"{name}: {error}") from error
    if digest is None:
        what = "an upload" if name == "Content-Digest" else "a part"
        raise Problem("invalid-message", f"{what} needs a {name} header: blake3=:BASE64:")
    return digest
