"""The sending of immutable bytes: ETag, Range, If-None-Match, cached for ever.

They come from memory if they were just published, and otherwise from their file. It is opened before the answer begins,
so deleting it meanwhile does no harm.
"""

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.http.head import wants_head_only
from coordinator.http.problems import problem_response
from coordinator.store.files import PIECE_BYTES
from coordinator.tuning.pieces import PieceSizes
from protocol.digest import Buffer
from protocol.errors import Problem
from protocol.wire import MEDIA_TYPE


class _Blob(Response):
    """An answer of `size` bytes, sent piece by piece."""

    def __init__(self, status: int, headers: dict[str, str], size: int) -> None:
        super().__init__(status_code=status, headers={**headers, "Content-Length": str(size)}, media_type=MEDIA_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if not wants_head_only(scope):  # for which reading the file would be wasted
            async for piece in self._pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _pieces(self) -> AsyncIterator[Buffer]:
        raise NotImplementedError


class _FromMemory(_Blob):
    def __init__(self, headers: dict[str, str], content: memoryview, piece_sizes: PieceSizes) -> None:
        super().__init__(200, headers, len(content))
        self._content, self._piece_sizes = content, piece_sizes

    async def _pieces(self) -> AsyncIterator[Buffer]:
        with self._piece_sizes.transfer():  # counts, for the server copies what it cannot send at once
            at = 0
            while at < len(self._content):
                piece = self._content[at : at + min(self._piece_sizes.bytes, PIECE_BYTES)]
                yield piece
                at += len(piece)


class _FromFile(_Blob):
    """Bytes [start, stop) of an open file, which is closed at the end."""

    def __init__(
        self, status: int, headers: dict[str, str], file: BinaryIO, start: int, stop: int, piece_sizes: PieceSizes
    ) -> None:
        super().__init__(status, headers, stop - start)
        self._file, self._start, self._stop, self._piece_sizes = file, start, stop, piece_sizes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)

    async def _pieces(self) -> AsyncIterator[Buffer]:
        with self._piece_sizes.transfer():
            at = self._start
            while at < self._stop:
                wanted = min(self._piece_sizes.bytes, self._stop - at)
                piece = await run_in_threadpool(os.pread, self._file.fileno(), wanted, at)
                if not piece:
                    raise OSError(f"{self._file.name} ends at byte {at} of {self._stop}")
                yield piece
                at += len(piece)


def blob(request: Request, path: Path, digest: bytes, piece_sizes: PieceSizes) -> Response:
    """Return the file at `path`, or the range of it that is asked for, as an answer. Its BLAKE3 digest is its ETag.

    If several ranges are asked for, the whole is the answer, as RFC 9110 allows. Problem `gone` if it was deleted.
    """
    headers = _headers(digest)
    if _is_known(request, headers):
        return Response(status_code=304, headers=headers)
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        raise Problem(
            "gone", "these bytes were deleted by the retention rule; recover from the latest checkpoint"
        ) from None
    try:
        size = os.fstat(file.fileno()).st_size
        ranges = _ranges(_range_header(request, headers), size)
    except BaseException:
        file.close()
        raise
    if ranges and all(start >= stop for start, stop in ranges):
        file.close()
        return _not_satisfiable(request.headers["range"], size)
    if len(ranges) != 1:
        return _FromFile(200, headers, file, 0, size, piece_sizes)
    ((start, stop),) = ranges
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return _FromFile(206, headers, file, start, stop, piece_sizes)


def _not_satisfiable(asked: str, size: int) -> Response:
    answer = problem_response(
        Problem("range-not-satisfiable", f"Range: {asked[:100]} does not lie within the {size} bytes")
    )
    answer.headers["Content-Range"] = f"bytes */{size}"
    return answer


def blob_in_memory(request: Request, content: memoryview, digest: bytes, piece_sizes: PieceSizes) -> Response | None:
    """Return `content`, whose BLAKE3 digest is `digest`, as an answer; None if a range of it is asked for."""
    headers = _headers(digest)
    if _is_known(request, headers):
        return Response(status_code=304, headers=headers)
    return None if _range_header(request, headers) else _FromMemory(headers, content, piece_sizes)


def _headers(digest: bytes) -> dict[str, str]:
    return {
        "ETag": f'"{digest.hex()}"',
        "Cache-Control": "private, max-age=31536000, immutable",
        "Accept-Ranges": "bytes",
    }


def _is_known(request: Request, headers: dict[str, str]) -> bool:
    """Return True if the client says that it has these bytes."""
    wanted = request.headers.get("if-none-match", "")
    return wanted == "*" or headers["ETag"] in (each.strip().removeprefix("W/") for each in wanted.split(","))


def _range_header(request: Request, headers: dict[str, str]) -> str | None:
    """Return the Range header; None if there is none, or its If-Range means other bytes than these."""
    etag = headers["ETag"]
    return request.headers.get("range") if request.headers.get("if-range", etag) == etag else None


def _ranges(header: str | None, size: int) -> list[tuple[int, int]]:
    """Return the half-open ranges that a Range header asks for; one that begins behind the end is empty.

    The list is empty if the header is to be ignored (RFC 9110, section 14.2): it is absent or malformed, or its unit is
    unknown.
    """
    unit, _, listed = (header or "").partition("=")
    if unit.strip().lower() != "bytes":
        return []
    ranges = [_range(part, size) for part in listed.split(",")]
    return [each for each in ranges if each is not None] if None not in ranges else []


def _range(part: str, size: int) -> tuple[int, int] | None:
    """Return one half-open range within `size` bytes; None if it is malformed."""
    match = re.fullmatch(r"[ \t]*([0-9]*)-([0-9]*)[ \t]*", part)
    if match is None or match.groups() == ("", ""):
        return None
    first, last = (_number(digits) for digits in match.groups())
    if not match[1]:
        return max(0, size - last), size  # the last so many bytes
    if match[2] and last < first:
        return None
    return min(first, size), min(last + 1, size) if match[2] else size


def _number(digits: str) -> int:
    """Return the number; of one with too many digits, one beyond any file's end, as Python limits what it parses."""
    return int(digits or "0") if len(digits) <= 18 else 10**18
