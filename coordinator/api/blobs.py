"""Sending immutable files: ETag, Range, If-None-Match, cached for ever."""

import re
from pathlib import Path

from fastapi import Request
from fastapi.responses import FileResponse, Response

from protocol.errors import Problem

MAX_RANGES = 100
PAYLOAD_TYPE = "application/vnd.outerstep.payload"


class _BlobResponse(FileResponse):
    chunk_size = 1 << 17  # one is held per download: twice starlette's, and memory hardly grows with the workers


def blob(request: Request, path: Path, digest: bytes) -> Response:
    """The file at `path`, whose BLAKE3 digest is known and is its ETag."""
    etag = f'"{digest.hex()}"'
    headers = {"ETag": etag, "Cache-Control": "public, max-age=31536000, immutable", "Accept-Ranges": "bytes"}
    wanted = request.headers.get("if-none-match", "")
    if wanted == "*" or etag in (each.strip().removeprefix("W/") for each in wanted.split(",")):
        return Response(status_code=304, headers=headers)
    if not path.is_file():
        raise Problem("gone", "these bytes were deleted by the retention rule; recover from the latest checkpoint")
    if request.headers.get("if-range", etag) == etag:
        _check_range(request.headers.get("range", "bytes=0-"), path.stat().st_size)
    return _BlobResponse(path, media_type=PAYLOAD_TYPE, headers=headers)


def _check_range(header: str, size: int) -> None:
    """Problem `range-not-satisfiable` for whatever starlette would refuse in plain text."""
    unit, _, ranges = header.partition("=")
    parts = [re.fullmatch(r"\s*([0-9]{1,18})?-([0-9]{1,18})?\s*", part) for part in ranges.split(",")]
    if (
        unit.strip().lower() != "bytes"
        or len(parts) > MAX_RANGES
        or not all(_lies_within(part, size) for part in parts)
    ):
        raise Problem("range-not-satisfiable", f"Range: {header[:100]} does not lie within the {size} bytes")


def _lies_within(part: re.Match[str] | None, size: int) -> bool:
    if part is None:
        return False
    first, last = part.groups()
    if first is None:
        return last is not None and int(last) > 0  # the last so many bytes
    return int(first) < size and (last is None or int(first) <= int(last))
