"""The limit on a request's body: a larger one is refused before it is read, or while it is if its length is unknown.

A message is read and parsed here, a large one on a thread of its own; a route gets it when it is there and valid.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from email.message import Message as MediaType
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.types import Message

from coordinator.http.arriving import pieces
from coordinator.http.authentication import REFUSED_IN_S
from coordinator.http.parsing import parse
from coordinator.http.problems import refusal
from coordinator.service import Coordinator
from coordinator.store.identity import Identity
from protocol.errors import Problem
from protocol.messages import Scope

MESSAGE_BYTES = 16 << 10

_ATTRIBUTE = "body_limit"  # of an endpoint
_WITH_A_BODY = {"PATCH", "POST", "PUT"}
_NO_MESSAGE = object()
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class Limit:
    """What an endpoint takes: bytes, values of JSON, and of whom more than MESSAGE_BYTES. `streamed`: it reads the body
    itself, piece by piece."""

    bytes: int | None = MESSAGE_BYTES
    values: int = MESSAGE_BYTES
    large_of: Callable[[Identity], bool] = lambda _: True
    streamed: bool = False


def takes_up_to(
    max_bytes: int | None,
    *,
    values: int = MESSAGE_BYTES,
    large_of: Callable[[Identity], bool] = lambda _: True,
    streamed: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Declare an endpoint's limit on the body, as `Limit` says.

    None: the endpoint receives a payload, whose limit depends on the fragment (`receiving.py`).
    """

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _ATTRIBUTE, Limit(max_bytes, values, large_of, streamed))
        return endpoint

    return declare


class LimitedRoute(APIRoute):
    """A route that takes no larger body than its endpoint declares. Authentication comes first.

    TypeError where the endpoint takes a body and declares nothing. The body of others may be as large as a message;
    nobody looks at it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None or bool(_WITH_A_BODY & set(self.methods or ()))
        if takes_body and not hasattr(self.endpoint, _ATTRIBUTE):
            raise TypeError(f"{self.path}: declare by takes_up_to how large a body it takes")
        limit: Limit = getattr(self.endpoint, _ATTRIBUTE, Limit())
        most = limit.bytes
        if most is None:
            return handle
        message: TypeAdapter[Any] | None = None
        if self.body_field is not None:
            annotation: Any = self.body_field.field_info.annotation
            message = TypeAdapter(annotation)

        async def handle_limited(request: Request) -> Response:
            length = request.headers.get("content-length", "0")
            if not length.isdigit() or int(length) > most:
                return refusal(Problem("payload-too-large", _detail(most)), request.headers)
            announced = most if "transfer-encoding" in request.headers else int(length)
            if limit.streamed or not takes_body:
                return await handle(_limited(request, most))
            with ExitStack() as held:
                if announced > MESSAGE_BYTES:
                    try:
                        _admit_large(request, limit, announced, held)
                    except Problem as problem:
                        await asyncio.sleep(REFUSED_IN_S)
                        return refusal(problem, request.headers, discarded_bytes=0)
                read = await _read(_limited(request, most), message, limit.values)
                try:
                    return await handle(read)
                except RequestValidationError as error:
                    raise read.fault or error from None

        return handle_limited


def _admit_large(request: Request, limit: Limit, size: int, held: ExitStack) -> None:
    """Count a large message with its sender until `held` is closed. Raises Problem: forbidden, too-many-requests."""
    service: Coordinator = request.app.state.coordinator
    identity: Identity = request.state.identity
    if not limit.large_of(identity) and not identity.allows(Scope.ADMIN):
        raise Problem("forbidden", f"with this token a message has at most {MESSAGE_BYTES} bytes here")
    if not identity.allows(Scope.ADMIN):
        service.callers.rates.take(request.state.caller, size / MESSAGE_BYTES)
    held.enter_context(service.callers.message(request.state.caller, size))


class _Read(Request):
    """A request whose body was read. `parsed`: the message in it, as FastAPI gets it. `fault`: why it is none, which is
    told once FastAPI has found that the token may send one, and that what it got instead is no message."""

    def __init__(self, request: Request, content: bytes, parsed: Any, fault: Exception | None = None) -> None:
        super().__init__(request.scope)
        self._content, self._parsed = content, parsed
        self.fault = fault

    async def body(self) -> bytes:
        return self._content

    async def json(self) -> Any:
        return self._parsed


async def _read(request: Request, message: TypeAdapter[Any] | None, max_values: int) -> _Read:
    """Read the body; parse it where it is a message."""
    service: Coordinator = request.app.state.coordinator
    content = b"".join([piece async for piece in pieces(request, service.settings)])
    if message is None or not content:
        return _Read(request, content, None)
    if not _is_json(request):
        raise Problem("invalid-message", "a message is JSON: send it with Content-Type: application/json")
    act = partial(parse, content, message, max_values)
    try:
        if len(content) <= MESSAGE_BYTES:
            return _Read(request, content, act())
        return _Read(request, content, await anyio.to_thread.run_sync(act, limiter=service.parsing))
    except (Problem, RequestValidationError) as fault:
        return _Read(request, content, _NO_MESSAGE, fault)


def _is_json(request: Request) -> bool:
    """Return True if FastAPI would take the body for JSON too."""
    media_type = MediaType()
    media_type["content-type"] = request.headers.get("content-type", "")
    subtype = media_type.get_content_subtype()
    return media_type.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


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
