"""Around every request: a request id, and an upper bound of what a body may weigh."""

import re
import uuid
from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.problems import fault_response, refuse
from protocol.errors import Problem
from protocol.spec import MAX_SPEC_BYTES

# Exactly these addresses: a worker or a run may be called "assignment" or "fragments".
_MAX_BYTES = {
    re.compile(r"POST /v1/runs"): MAX_SPEC_BYTES,
    re.compile(r"PUT /v1/runs/[^/]+/workers/[^/]+"): 16 << 20,  # a join lists every tensor of the model
    re.compile(r"PUT /v1/runs/[^/]+/workers/[^/]+/assignment"): 4 << 20,  # with the units that are carried
}
_MAX_OTHER_BYTES = 16 << 10
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_UPLOAD = re.compile(r"/v1/runs/[^/]+/(rounds/[^/]+/fragments/[^/]+/contributions/[^/]+|checkpoints/0/fragments/[^/]+)")


def max_message_bytes(method: str, path: str) -> int:
    """What a JSON body, or a run's spec, may weigh at this address."""
    asked = f"{method} {path}"
    return next((limit for address, limit in _MAX_BYTES.items() if address.fullmatch(asked)), _MAX_OTHER_BYTES)


class RequestId:
    """Takes the client's X-Request-Id, or makes one; answers with it, also where the application failed.

    Not left to starlette, whose own last resort answers without the id and then drops the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # whatever it is, the client hears of it as a problem
            if started:
                raise
            await fault_response(scope, request_id, error)(scope, receive, send_with_id)


class LimitBody:
    """Refuses messages that are too large, before they are read where they say so, while they are read otherwise.

    Payload uploads have limits of their own, which depend on the fragment (`uploads.py`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _UPLOAD.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        limit = max_message_bytes(scope["method"], scope["path"])
        too_large = Problem("payload-too-large", f"a message has at most {limit} bytes here")
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            await refuse(too_large, scope, receive, send)
            return
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                # FastAPI makes a 400 of every other exception that reading a body raises.
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_large.detail)
            return message

        await self._app(scope, receive_limited, send)
