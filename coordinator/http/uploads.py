"""Uploads: receive payloads of any size in bounded memory, into memory if the budget allows and otherwise into a file.

A body is a payload or, with Content-Range, a part of one.
"""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator.http.bodies import chunks
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.data_directory import DataDirectory
from coordinator.store.partial_uploads import PartialUpload
from coordinator.store.payloads import Body
from protocol.digest import parse_content_digest
from protocol.errors import Problem, Remedy
from protocol.messages import PartReply

CHUNK_BYTES = 1 << 18  # of a body that goes into a file: held in memory at once
ROUNDS = 4  # rounds of payloads that a member may send at once: a broken connection keeps its payload for a while
MAX_MISSING = 100  # missing ranges in one response


@dataclass(frozen=True)
class Part:
    """The position of a body in its payload, and that payload's BLAKE3 digest."""

    start: int
    total: int
    digest: bytes


class Sink:
    """The destination of a body while it is received: the memory `content`, which has room for all of it, or, if that
    is None, a new file in the data directory. `size` and `digest` are the announced ones.

    A file is written and hashed on threads: a busy disk may be slow, and the event loop has to answer heartbeats.
    """

    def __init__(self, size: int, digest: bytes, data: DataDirectory, content: memoryview | None) -> None:
        self._size, self._digest, self._content = size, digest, content
        self._path, self._check_room = data.scratch(), data.check_space
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        self._arrived = bytearray()  # not a list: chunks of two bytes would take 28 times the memory as objects

    async def receive(self, request: Request, settings: Settings) -> None:
        """Receive the whole body. Raises Problem: request-timeout; digest-mismatch, also if the length differs."""
        received_bytes = 0
        async for chunk in chunks(request, settings):
            start, received_bytes = received_bytes, received_bytes + len(chunk)
            if received_bytes > self._size:
                break
            if self._content is not None:
                self._content[start:received_bytes] = chunk
                continue
            self._arrived += chunk
            if len(self._arrived) >= CHUNK_BYTES:
                await run_in_threadpool(self._write)
        if received_bytes != self._size:
            raise Problem("digest-mismatch", f"{received_bytes} bytes arrived, but {self._size} were announced")

    def _write(self) -> None:
        self._check_room(len(self._arrived))
        if self._file is None:
            self._file = self._path.open("xb")
        self._file.write(self._arrived)
        self._hasher.update(self._arrived)
        self._arrived = bytearray()

    def complete(self) -> Body:
        """Return the body. Raises Problem `digest-mismatch`.

        Call it on the thread that processes the body, which saves a switch between threads.
        """
        if self._content is not None:
            self._hasher.update(self._content)
        else:
            self._write()
            assert self._file is not None
            self._file.close()
        digest = self._hasher.digest()
        if digest != self._digest:
            detail = f"the body's digest is {digest.hex()}, but {self._digest.hex()} was announced"
            raise Problem("digest-mismatch", detail)
        return Body(self._path if self._content is None else self._content, self._size, digest)

    def discard(self) -> None:
        """Delete the file. Memory is free as soon as nothing refers to it. Always called at the end."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            if self._content is None:
                self._path.unlink(missing_ok=True)


class ReceivedUpload:
    """The received body of a request. `part` is None if it is a whole payload. Set `finished` if no other part of the
    payload is needed."""

    def __init__(
        self, sink: Sink, data: DataDirectory, part: Part | None = None, whole: PartialUpload | None = None
    ) -> None:
        self._sink, self._data, self._whole, self.part = sink, data, whole, part
        self.finished = False

    def complete(self) -> Body | PartReply:
        """Return the payload, or the ranges that are still missing. Raises Problem: digest-mismatch, invalid-message.

        Call it on the thread that processes the payload, which saves a switch between threads.
        """
        body = self._sink.complete()
        if self.part is None or self._whole is None:
            return body
        if self._whole.in_file:
            self._data.check_space(body.size)
        missing = self._whole.add(self.part.start, body)
        self.finished = not missing
        return PartReply(missing=missing[:MAX_MISSING]) if missing else self._whole.body()


@asynccontextmanager
async def receive_upload(
    request: Request, service: Coordinator, max_bytes: int, round_bytes: int, members: int = 0
) -> AsyncIterator[ReceivedUpload]:
    """Receive the request's body. The block then gets the upload and calls `complete`.

    `members`: how many share the memory for payloads; 0 if the body is to go into a file.
    `round_bytes`: the size of all payloads that the member sends in a round. At most ROUNDS times that many bytes of
    this member may arrive at once. Its payloads with missing parts have the same limit.

    A file is deleted at the end of the block. Raises Problem: length-required, payload-too-large, invalid-message (no
    digest), digest-mismatch, request-timeout, too-many-requests.
    """
    size, announced, part = _announced(request, max_bytes)
    owner = _owner(request)
    with service.quotas.upload(owner, size, ROUNDS * round_bytes):
        share = (owner, members) if part is None else ("", 1)  # a part is in memory for a moment, and is no payload
        memory = await service.memory.take_soon(size, *share) if members else None
        sink = Sink(size, announced, service.data, memory)
        try:
            await sink.receive(request, service.settings)
            if part is None:
                yield ReceivedUpload(sink, service.data)
            else:
                with _part_of_whole(request, service, sink, part, round_bytes, members) as upload:
                    yield upload
        finally:
            sink.discard()


def _owner(request: Request) -> str:
    identity = request.state.identity
    return f"{identity.run} {identity.worker}"


@contextmanager
def _part_of_whole(
    request: Request, service: Coordinator, sink: Sink, part: Part, round_bytes: int, members: int
) -> Iterator[ReceivedUpload]:
    """Give the block a part of a payload. Forget that payload once it is accepted or finally rejected."""

    def target() -> memoryview | Path:
        memory = service.memory.take(part.total, key[0], members) if members else None
        return service.data.scratch() if memory is None else memory

    key = _owner(request), request.url.path
    whole = service.partial_uploads.get(key, part.total, part.digest, target, ROUNDS * round_bytes)
    upload = ReceivedUpload(sink, service.data, part, whole)
    try:
        with whole.kept():
            yield upload
    except Problem as problem:
        upload.finished = whole.corrupt or problem.remedy is not Remedy.RETRY
        raise
    finally:
        if upload.finished:
            service.partial_uploads.drop(key, whole)


def part_response(reply: PartReply) -> Response:
    """Return the response to a part, while other parts of the payload are missing."""
    return Response(reply.model_dump_json(), HTTPStatus.ACCEPTED, media_type="application/json")


def _announced(request: Request, max_bytes: int) -> tuple[int, bytes, Part | None]:
    """Return the body's announced size and digest, and its part of the payload (None: it is a whole payload)."""
    length = request.headers.get("content-length")
    if length is None or not length.isdigit():
        raise Problem("length-required", "an upload needs a Content-Length")
    if int(length) > max_bytes:
        raise Problem("payload-too-large", f"the body has {length} bytes; at most {max_bytes} are accepted here")
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
        raise Problem("payload-too-large", f"the payload has {total} bytes; at most {max_bytes} are accepted here")
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
