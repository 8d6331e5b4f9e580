"""Headers of every kind of answer: X-Request-Id, X-Content-Type-Options, Cache-Control, and those that a handler has
added."""

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.authentication import needs_a_token
from coordinator.http.problems import fault_response
from coordinator.http.request_ids import request_id

_ADDED = "answer_headers"  # among the request's state


def add_answer_header(request: Request, name: str, value: str) -> None:
    """Let the answer to the request carry this header, even if it is a problem."""
    request.scope.setdefault("state", {}).setdefault(_ADDED, {})[name] = value


class AnswerHeaders:
    """Middleware that adds the headers; an answer to a fault has them too.

    Faults are not left to starlette, whose own answer to them lacks the id and then drops the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id(scope)
                headers["X-Content-Type-Options"] = "nosniff"
                if needs_a_token(scope["path"]):  # what needs a token is for nobody else
                    headers.setdefault("Cache-Control", "private, no-store")
                headers.update(scope.get("state", {}).get(_ADDED, {}))
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:  # whatever it is, the client is answered with a problem
            if started:
                raise
            await fault_response(scope, request_id(scope), error)(scope, receive, send_with_headers)
