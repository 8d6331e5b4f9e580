"""The sending of immutable bytes: ETag, Range, If-None-Match, cached for ever.

They come from memory if they were just published, and otherwise from their blob. It is opened before the answer begins,
so deleting it meanwhile does no harm.
"""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.http.head import wants_head_only
from coordinator.http.problems import problem_response
from coordinator.store.blobs import Blobs, Reader, Stored
from protocol.digest import Buffer
from protocol.errors import Problem
from protocol.wire import MEDIA_TYPE

PIECE_BYTES = 1 << 18  # so much of an answer is in memory at once


class _Blob(Response):
    """An answer: bytes [start, stop) of `source`, piece by piece. A reader is closed at the end."""

    def __init__(
        self, status: int, headers: dict[str, str], source: memoryview | Reader, start: int, stop: int
    ) -> None:
        super().__init__(
            status_code=status, headers={**headers, "Content-Length": str(stop - start)}, media_type=MEDIA_TYPE
        )
        self._source, self._start, self._stop = source, start, stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with nullcontext() if isinstance(self._source, memoryview) else self._source:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if not wants_head_only(scope):  # for which reading the blob would be wasted
                async for piece in self._pieces():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _pieces(self) -> AsyncIterator[Buffer]:
        for at in range(self._start, self._stop, PIECE_BYTES):
            stop = min(at + PIECE_BYTES, self._stop)
            if isinstance(self._source, memoryview):
                yield self._source[at:stop]
            else:
                yield await run_in_threadpool(_read, self._source, at, stop)


def _read(reader: Reader, start: int, stop: int) -> memoryview:
    piece = memoryview(bytearray(stop - start))
    if reader.read_into(piece, start) != len(piece):
        raise OSError(f"the blob of {reader.size} bytes ends before byte {stop}")
    return piece


def blob(request: Request, blobs: Blobs, stored: Stored, missing: Callable[[], Problem]) -> Response:
    """Return the blob, or the range of it that is asked for, as an answer. Its BLAKE3 digest is its ETag.

    If several ranges are asked for, the whole is the answer, as RFC 9110 allows. Raises the Problem that `missing`
    makes if the blob is not there, or has lost some of its bytes.
    """
    headers = _headers(stored.digest)
    if _is_known(request, headers):
        return Response(status_code=304, headers=headers)
    try:
        reader = blobs.open(stored.name)
    except FileNotFoundError:
        raise missing() from None
    if stored.size not in (None, reader.size):
        reader.close()
        raise missing()
    return _answer(request, headers, reader, reader.size)


def blob_in_memory(request: Request, content: memoryview, digest: bytes) -> Response:
    """Return `content`, whose BLAKE3 digest is `digest`, or the range of it that is asked for, as an answer."""
    headers = _headers(digest)
    if _is_known(request, headers):
        return Response(status_code=304, headers=headers)
    return _answer(request, headers, content, len(content))


def _answer(request: Request, headers: dict[str, str], source: memoryview | Reader, size: int) -> Response:
    ranges = _ranges(_range_header(request, headers), size)
    if ranges and all(start >= stop for start, stop in ranges):
        if not isinstance(source, memoryview):
            source.close()
        return _not_satisfiable(request.headers["range"], size)
    if len(ranges) != 1:
        return _Blob(200, headers, source, 0, size)
    ((start, stop),) = ranges
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return _Blob(206, headers, source, start, stop)


def _not_satisfiable(asked: str, size: int) -> Response:
    answer = problem_response(
        Problem("range-not-satisfiable", f"Range: {asked[:100]} does not lie within the {size} bytes")
    )
    answer.headers["Content-Range"] = f"bytes */{size}"
    return answer


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
