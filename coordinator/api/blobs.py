"""Sending immutable files: ETag, Range, If-None-Match, cached for ever."""

from pathlib import Path

from fastapi import Request
from fastapi.responses import FileResponse, Response

from protocol.errors import Problem

PAYLOAD_TYPE = "application/vnd.outerstep.payload"


class _BlobResponse(FileResponse):
    chunk_size = 1 << 20  # starlette's 64 KiB pieces cost half the throughput


def blob(request: Request, path: Path, digest: bytes) -> Response:
    """The file at `path`, whose BLAKE3 digest is known and is its ETag."""
    etag = f'"{digest.hex()}"'
    headers = {"ETag": etag, "Cache-Control": "public, max-age=31536000, immutable", "Accept-Ranges": "bytes"}
    wanted = request.headers.get("if-none-match", "")
    if wanted == "*" or etag in (each.strip().removeprefix("W/") for each in wanted.split(",")):
        return Response(status_code=304, headers=headers)
    if not path.is_file():
        raise Problem("gone", "these bytes were deleted by the retention rule; recover from the latest checkpoint")
    return _BlobResponse(path, media_type=PAYLOAD_TYPE, headers=headers)
