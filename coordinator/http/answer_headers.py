"""Headers of every kind of answer: X-Request-Id, Cache-Control, and those that a handler has added."""

import re
import uuid

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.authentication import needs_a_token
from coordinator.http.problems import fault_response

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDED = "answer_headers"  # among the request's state


def add_answer_header(request: Request, name: str, value: str) -> None:
    """Let the answer to the request carry this header, even if it is a problem."""
    request.scope.setdefault("state", {}).setdefault(_ADDED, {})[name] = value


class AnswerHeaders:
    """Middleware that adds the headers. X-Request-Id is the client's, or a new one; an answer to a fault has it too.

    Faults are not left to starlette, whose own answer to them lacks the id and then drops the connection.
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

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if needs_a_token(scope["path"]):  # what needs a token is for nobody else
                    headers.setdefault("Cache-Control", "private, no-store")
                headers.update(scope.get("state", {}).get(_ADDED, {}))
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:  # whatever it is, the client is answered with a problem
            if started:
                raise
            await fault_response(scope, request_id, error)(scope, receive, send_with_headers)
