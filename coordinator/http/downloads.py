"""Downloads of immutable bytes: ETag, Range, If-None-Match, cached forever.

The bytes come from memory if they were just published, otherwise from their blob. The blob is opened before the
response begins, so it may be deleted in the meantime. If a standby has forwarded the request, the response only names
the blob, and the standby sends it (`leadership/forwarding.py`).
"""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Annotated

from fastapi import Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.http.middleware import is_head
from coordinator.http.problems import problem_response
from coordinator.store.blobs import Blobs, Reader, StoredBlob
from protocol.digest import Buffer
from protocol.errors import Problem
from protocol.versions import LENGTH_HEADER
from protocol.wire import MEDIA_TYPE

DIRECT_S = 300.0  # how long a redirect to the store can be used
CHUNK_BYTES = 1 << 18  # how much of a response is in memory at once
MOST_BYTES = 10**18  # more than any blob has
_RANGE = re.compile("bytes=([0-9]{1,18})-([0-9]{1,18})?")

# In the scope of a request if a standby sends the blob that is asked for: returns the header that names it.
BY_STANDBY = "outerstep.by_standby"
BLOB_HEADER = "Outerstep-Blob"  # names the blob to the standby (`leadership/tickets.py`)

Direct = Annotated[bool, Query(description="Answer with a redirect to the store, if it can be read directly.")]


class _BlobResponse(Response):
    """Sends bytes [start, stop) of `source`, chunk by chunk. A reader is closed at the end."""

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
            if not is_head(scope):  # the response to HEAD has no body
                async for chunk in self._chunks():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _chunks(self) -> AsyncIterator[Buffer]:
        for at in range(self._start, self._stop, CHUNK_BYTES):
            stop = min(at + CHUNK_BYTES, self._stop)
            if isinstance(self._source, memoryview):
                yield self._source[at:stop]
            else:
                yield await run_in_threadpool(_read, self._source, at, stop)


def _read(reader: Reader, start: int, stop: int) -> memoryview:
    chunk = memoryview(bytearray(stop - start))
    if reader.read_into(chunk, start) != len(chunk):
        raise OSError(f"the blob of {reader.size} bytes ends before byte {stop}")
    return chunk


def blob_response(request: Request, blobs: Blobs, stored: StoredBlob, missing: Callable[[], Problem]) -> Response:
    """Return the blob, or the requested range of it. Its BLAKE3 digest is its ETag.

    Raises the Problem that `missing` returns if the blob does not exist, or has lost some of its bytes.
    """
    headers = _headers(stored.digest)
    if _is_known(request, headers):
        return Response(status_code=304, headers=headers)
    if is_sent_by_standby(request):
        return Response(headers={BLOB_HEADER: request.scope[BY_STANDBY](stored)})
    try:
        reader = blobs.open(stored.name)
    except FileNotFoundError:
        raise missing() from None
    if stored.size not in (None, reader.size):
        reader.close()
        raise missing()
    return _response(request, headers, reader, reader.size)


def is_sent_by_standby(request: Request) -> bool:
    """Return True if a standby has forwarded the request and can send the blob itself."""
    return BY_STANDBY in request.scope


def direct_response(request: Request, blobs: Blobs, stored: StoredBlob) -> Response | None:
    """Return a redirect to the store's own copy of a blob; None if the store cannot be read directly.

    The store's answer has another ETag, so the redirect has the digest, and the length.
    """
    if blobs.direct is None or stored.size is None:
        return None
    headers = {
        "ETag": f'"{stored.digest.hex()}"',
        "Cache-Control": "no-store",
        "Location": blobs.direct.download_url(stored.name, DIRECT_S),
        LENGTH_HEADER: str(stored.size),
    }
    if _is_known(request, headers):
        return Response(status_code=304, headers=_headers(stored.digest))
    return Response(status_code=307, headers=headers)


def memory_response(request: Request, content: memoryview, digest: bytes) -> Response:
    """Return `content`, whose BLAKE3 digest is `digest`, or the requested range of it."""
    headers = _headers(digest)
    if _is_known(request, headers):
        return Response(status_code=304, headers=headers)
    return _response(request, headers, content, len(content))


def _response(request: Request, headers: dict[str, str], source: memoryview | Reader, size: int) -> Response:
    asked = _range(request, headers)
    if asked is None:
        return _BlobResponse(200, headers, source, 0, size)
    start, stop = asked[0], min(asked[1], size)
    if start >= size:
        if not isinstance(source, memoryview):
            source.close()
        return _not_satisfiable(request.headers["range"], size)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return _BlobResponse(206, headers, source, start, stop)


def _not_satisfiable(requested: str, size: int) -> Response:
    problem = Problem("range-not-satisfiable", f"Range: {requested[:100]} is not within the {size} bytes")
    response = problem_response(problem)
    response.headers["Content-Range"] = f"bytes */{size}"
    return response


def _headers(digest: bytes) -> dict[str, str]:
    return {
        "ETag": f'"{digest.hex()}"',
        "Cache-Control": "private, max-age=31536000, immutable",
        "Accept-Ranges": "bytes",
    }


def _is_known(request: Request, headers: dict[str, str]) -> bool:
    """True if the client already has these bytes, according to its If-None-Match."""
    wanted = request.headers.get("if-none-match", "")
    return wanted == "*" or headers["ETag"] in (each.strip().removeprefix("W/") for each in wanted.split(","))


def _range(request: Request, headers: dict[str, str]) -> tuple[int, int] | None:
    """Return the half-open range of bytes that the client asks for. None if it is to get all of them: without a Range
    header, with one that this server does not support (RFC 9110, section 14.2), or if If-Range names other bytes."""
    etag = headers["ETag"]
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or request.headers.get("if-range", etag) != etag:
        return None
    start, stop = int(found[1]), int(found[2] or MOST_BYTES) + 1
    return None if start >= stop else (start, stop)
