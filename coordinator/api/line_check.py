"""Line checks: bytes of no meaning, up and down, by which a box measures its line before it joins. Nothing is kept."""

import os
from collections.abc import AsyncIterator
from functools import cache
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from coordinator.http.access import LineChecker, Service
from coordinator.http.arriving import pieces
from coordinator.http.describing import Answers, Document, refusing
from coordinator.http.limits import LimitedRoute, takes_up_to
from coordinator.http.receiving import PIECE_BYTES
from protocol.messages import LINE_CHECK_BYTES

router = APIRouter(prefix="/v1/line-check", tags=["line check"], route_class=LimitedRoute)

_MEDIA_TYPE = "application/octet-stream"
_BYTES: Document = {_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_SENT: Answers = {"200": {"description": "Random bytes, as many as were asked for.", "content": _BYTES}}


@router.get("", response_class=StreamingResponse, responses=_SENT | refusing("forbidden"))
async def line_check_down(
    _: LineChecker, count: Annotated[int, Query(alias="bytes", ge=0, le=LINE_CHECK_BYTES)] = 0
) -> StreamingResponse:
    """So many bytes; none says that the token lets workers join."""
    headers = {"Content-Length": str(count), "Cache-Control": "private, no-store"}
    return StreamingResponse(_noise(count), media_type=_MEDIA_TYPE, headers=headers)


@router.post(
    "",
    status_code=204,
    responses=refusing("forbidden"),
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
@takes_up_to(LINE_CHECK_BYTES, streamed=True)
async def line_check_up(request: Request, service: Service, _: LineChecker) -> Response:
    """Take the body, and drop it as it arrives."""
    async for _piece in pieces(request, service.settings):
        pass
    return Response(status_code=204)


async def _noise(count: int) -> AsyncIterator[bytes]:
    for at in range(0, count, PIECE_BYTES):
        yield _piece()[: count - at]


@cache
def _piece() -> bytes:
    """Return random bytes, which nothing on the way can compress."""
    return os.urandom(PIECE_BYTES)
