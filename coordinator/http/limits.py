"""The limit on a request's body: a larger one is refused before it is read, or while it is if its length is unknown."""

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message

from coordinator.http.problems import refusal
from protocol.errors import Problem

MESSAGE_BYTES = 16 << 10

_ATTRIBUTE = "max_body_bytes"  # of an endpoint
_WITH_A_BODY = {"PATCH", "POST", "PUT"}
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def takes_up_to(max_bytes: int | None) -> Callable[[Endpoint], Endpoint]:
    """Declare an endpoint's limit on the body.

    None: the endpoint receives a payload, whose limit depends on the fragment (`uploads.py`).
    """

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _ATTRIBUTE, max_bytes)
        return endpoint

    return declare


class LimitedRoute(APIRoute):
    """A route that takes no larger body than its endpoint declares. Authentication comes first.

    TypeError where the endpoint takes a body and declares nothing. The body of others may be as large as a message;
    nobody looks at it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None or _WITH_A_BODY & set(self.methods or ())
        if takes_body and not hasattr(self.endpoint, _ATTRIBUTE):
            raise TypeError(f"{self.path}: declare by takes_up_to how large a body it takes")
        limit: int | None = getattr(self.endpoint, _ATTRIBUTE, MESSAGE_BYTES)
        if limit is None:
            return handle

        async def handle_limited(request: Request) -> Response:
            length = request.headers.get("content-length", "0")
            if not length.isdigit() or int(length) > limit:
                return refusal(Problem("payload-too-large", _detail(limit)), request.headers)
            return await handle(_limited(request, limit))

        return handle_limited


def _limited(request: Request, limit: int) -> Request:
    """Return the same request, except that reading more than `limit` bytes of its body raises HTTPException."""
    seen = 0

    async def receive() -> Message:
        nonlocal seen
        message = await request.receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            # FastAPI makes a 400 of every other exception that reading a body raises.
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _detail(limit))
        return message

    return Request(request.scope, receive)


def _detail(limit: int) -> str:
    return f"a message has at most {limit} bytes here"
