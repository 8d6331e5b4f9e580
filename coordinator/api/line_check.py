"""Line checks: bytes of no meaning, up and down, by which a box measures its line before it joins. Nothing is kept."""

import os
from collections.abc import AsyncIterator
from functools import cache
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.callers import lineage_of
from coordinator.http.access import LineChecker, Service
from coordinator.http.arriving import pieces
from coordinator.http.describing import Answers, Document, refusing
from coordinator.http.limits import LimitedRoute, takes_up_to
from coordinator.http.receiving import PIECE_BYTES
from coordinator.service import Coordinator
from protocol.messages import LINE_CHECK_BYTES

router = APIRouter(prefix="/v1/line-check", tags=["line check"], route_class=LimitedRoute)

_MEDIA_TYPE = "application/octet-stream"
_BYTES: Document = {_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_SENT: Answers = {"200": {"description": "Random bytes, as many as were asked for.", "content": _BYTES}}


@router.get("", response_class=StreamingResponse, responses=_SENT | refusing("forbidden"))
async def line_check_down(
    _: LineChecker, count: Annotated[int, Query(alias="bytes", ge=0, le=LINE_CHECK_BYTES)] = 0
) -> StreamingResponse:
    """Send this many bytes; with 0, only check that the token allows joining. One check at a time per token."""
    headers = {"Content-Length": str(count), "Cache-Control": "private, no-store"}
    return _Counted(_noise(count), media_type=_MEDIA_TYPE, headers=headers)


@router.post(
    "",
    status_code=204,
    responses=refusing("forbidden"),
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
@takes_up_to(LINE_CHECK_BYTES, streamed=True)
async def line_check_up(request: Request, service: Service, caller: LineChecker) -> Response:
    """Take the body, and drop it as it arrives. One check at a time of one token."""
    with service.callers.line_check(lineage_of(caller)):
        async for _piece in pieces(request, service.settings):
            pass
    return Response(status_code=204)


class _Counted(StreamingResponse):
    """A line check that is counted among its caller's while it lasts. Problem `too-many-requests` where it has one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not int(self.headers["content-length"]):
            await super().__call__(scope, receive, send)
            return
        service: Coordinator = scope["app"].state.coordinator
        with service.callers.line_check(lineage_of(scope["state"]["identity"])):
            await super().__call__(scope, receive, send)


async def _noise(count: int) -> AsyncIterator[bytes]:
    for at in range(0, count, PIECE_BYTES):
        yield _piece()[: count - at]


@cache
def _piece() -> bytes:
    """Return random bytes, which nothing on the way can compress."""
    return os.urandom(PIECE_BYTES)
