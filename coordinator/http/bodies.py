"""Request bodies: their largest size, their lowest rate, and how a JSON message is parsed.

A body above its limit is rejected before it is read, or while it is read if its length is unknown. A body that stalls
or is too slow is dropped. A message is read and parsed here, a large one on a separate thread; the route gets it when
it is complete and valid.

JSON with too many values, too deep nesting or too many members per object is rejected as soon as a limit is exceeded.
pydantic reports every fault that it finds, which takes gigabytes for a million small objects. So values are counted
before the JSON is parsed, members while it is parsed, and lists end at their first fault (`fail_fast`).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
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
from pydantic import TypeAdapter, ValidationError
from starlette.types import Message

from coordinator.http.middleware import REJECT_DELAY_S
from coordinator.http.problems import rejection
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.identity import Identity
from protocol.errors import Problem
from protocol.messages import Scope

MESSAGE_BYTES = 16 << 10  # the limit of most messages; a longer message counts as large
MAX_MEMBERS = 64  # per object: twice as many as any message has

_ATTRIBUTE = "body_limit"  # of an endpoint
_METHODS_WITH_BODY = {"PATCH", "POST", "PUT"}
_NO_MESSAGE = object()
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


# --- the lowest rate --------------------------------------------------------------------------------------------------


class MinimumRate:
    """The lowest allowed rate of a body, measured over windows of `window_s` seconds. The network may be interrupted
    for most of a window if enough bytes arrive in the rest of it."""

    def __init__(self, bytes_per_s: float, window_s: float, now: float) -> None:
        self._bytes, self._window_s = bytes_per_s * window_s, window_s
        self._since, self._arrived = now, 0

    def arrived(self, count: int, now: float) -> bool:
        """Record that `count` bytes have arrived. Return False if a window has just ended with too few."""
        self._arrived += count
        if now - self._since < self._window_s:
            return True
        enough = self._arrived >= self._bytes
        self._since, self._arrived = now, 0
        return enough


async def chunks(request: Request, settings: Settings) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises Problem `request-timeout` if nothing, or too little, arrives for
    `upload_idle_s` seconds."""
    loop, idle_s, lowest = asyncio.get_running_loop(), settings.upload_idle_s, settings.min_body_bytes_per_s
    body, rate = request.stream(), MinimumRate(lowest, idle_s, loop.time())
    while True:
        try:
            async with asyncio.timeout(idle_s):
                chunk = await anext(body, None)
        except TimeoutError:
            raise Problem("request-timeout", f"nothing arrived for {idle_s:.0f} s; send it again") from None
        if not chunk:
            return
        if not rate.arrived(len(chunk), loop.time()):
            detail = f"fewer than {lowest:g} bytes per second arrived for {idle_s:.0f} s; send it again"
            raise Problem("request-timeout", detail)
        yield chunk


# --- the largest size -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BodyLimit:
    """The body that an endpoint accepts.

    bytes      the most bytes; None for a payload, whose limit depends on the fragment (`uploads.py`)
    values     the most JSON values
    large_for  returns whether this caller may send more than MESSAGE_BYTES
    streamed   True if the endpoint reads the body itself, chunk by chunk
    """

    bytes: int | None = MESSAGE_BYTES
    values: int = MESSAGE_BYTES
    large_for: Callable[[Identity], bool] = lambda _: True
    streamed: bool = False


def max_body(
    max_bytes: int | None,
    *,
    values: int = MESSAGE_BYTES,
    large_for: Callable[[Identity], bool] = lambda _: True,
    streamed: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Declare an endpoint's `BodyLimit`."""

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _ATTRIBUTE, BodyLimit(max_bytes, values, large_for, streamed))
        return endpoint

    return declare


class LimitedRoute(APIRoute):
    """A route that accepts no larger body than its endpoint declares by `max_body`. Authentication comes first.

    Raises TypeError if the endpoint takes a body and declares no limit. Other endpoints ignore the body; it may still
    have up to MESSAGE_BYTES.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None or bool(_METHODS_WITH_BODY & set(self.methods or ()))
        if takes_body and not hasattr(self.endpoint, _ATTRIBUTE):
            raise TypeError(f"{self.path}: declare by max_body how large a body it takes")
        limit: BodyLimit = getattr(self.endpoint, _ATTRIBUTE, BodyLimit())
        max_bytes = limit.bytes
        if max_bytes is None:
            return handle
        message: TypeAdapter[Any] | None = None
        if self.body_field is not None:
            annotation: Any = self.body_field.field_info.annotation
            message = TypeAdapter(annotation)

        async def handle_limited(request: Request) -> Response:
            length = request.headers.get("content-length", "0")
            if not length.isdigit() or int(length) > max_bytes:
                return rejection(Problem("payload-too-large", _detail(max_bytes)), request.headers)
            announced = max_bytes if "transfer-encoding" in request.headers else int(length)
            if limit.streamed or not takes_body:
                return await handle(_limited(request, max_bytes))
            with ExitStack() as held:
                if announced > MESSAGE_BYTES:
                    try:
                        _admit_large(request, limit, announced, held)
                    except Problem as problem:
                        await asyncio.sleep(REJECT_DELAY_S)
                        return rejection(problem, request.headers, discarded_bytes=0)
                read = await _read(_limited(request, max_bytes), message, limit.values)
                try:
                    return await handle(read)
                except RequestValidationError as error:
                    raise read.fault or error from None

        return handle_limited


def _admit_large(request: Request, limit: BodyLimit, size: int, held: ExitStack) -> None:
    """Count a large message towards its sender's quota until `held` is closed. Raises Problem: forbidden,
    too-many-requests."""
    service: Coordinator = request.app.state.coordinator
    identity: Identity = request.state.identity
    if not limit.large_for(identity) and not identity.allows(Scope.ADMIN):
        raise Problem("forbidden", f"with this token a message has at most {MESSAGE_BYTES} bytes here")
    if not identity.allows(Scope.ADMIN):
        service.quotas.rates.take(request.state.caller, size / MESSAGE_BYTES)
    held.enter_context(service.quotas.message(request.state.caller, size))


def _limited(request: Request, limit: int) -> Request:
    """Return the same request with a limit: reading more than `limit` bytes of its body raises HTTPException."""
    seen = 0

    async def receive() -> Message:
        nonlocal seen
        message = await request.receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            # FastAPI turns every other exception from reading a body into a 400.
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _detail(limit))
        return message

    return Request(request.scope, receive)


def _detail(limit: int) -> str:
    return f"a message has at most {limit} bytes here"


# --- how a message is parsed ------------------------------------------------------------------------------------------


class _ReadRequest(Request):
    """A request whose body has been read. `parsed`: the message, which FastAPI gets from `json`. `fault`: why the
    message is not valid. It is raised only after FastAPI has checked the token."""

    def __init__(self, request: Request, content: bytes, parsed: Any, fault: Exception | None = None) -> None:
        super().__init__(request.scope)
        self._content, self._parsed = content, parsed
        self.fault = fault

    async def body(self) -> bytes:
        return self._content

    async def json(self) -> Any:
        return self._parsed


async def _read(request: Request, message: TypeAdapter[Any] | None, max_values: int) -> _ReadRequest:
    """Read the body, and parse it if it is a message."""
    service: Coordinator = request.app.state.coordinator
    content = b"".join([chunk async for chunk in chunks(request, service.settings)])
    if message is None or not content:
        return _ReadRequest(request, content, None)
    if not _is_json(request):
        raise Problem("invalid-message", "a message is JSON: send it with Content-Type: application/json")
    act = partial(parse, content, message, max_values)
    try:
        if len(content) <= MESSAGE_BYTES:
            return _ReadRequest(request, content, act())
        return _ReadRequest(request, content, await anyio.to_thread.run_sync(act, limiter=service.parse_thread))
    except (Problem, RequestValidationError) as fault:
        return _ReadRequest(request, content, _NO_MESSAGE, fault)


def _is_json(request: Request) -> bool:
    """True if FastAPI too would parse the body as JSON."""
    media_type = MediaType()
    media_type["content-type"] = request.headers.get("content-type", "")
    subtype = media_type.get_content_subtype()
    return media_type.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def parse(body: bytes, message: TypeAdapter[Any], max_values: int) -> Any:
    """Return the body as a message. Raises Problem payload-too-large (too many values) or invalid-message. Raises
    RequestValidationError, which is answered as invalid-message, for a message of the wrong type."""
    if body.count(b",") >= max_values:
        raise Problem("payload-too-large", f"a message has at most {max_values} values here")
    try:
        found = json.loads(body, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        detail = f"the body is not JSON: {error.msg} (at character {error.pos})"
        raise Problem("invalid-message", detail) from error
    except RecursionError as error:
        raise Problem("invalid-message", "the body is not a JSON message: it is nested too deeply") from error
    except ValueError as error:  # not UTF-8, or a number with thousands of digits
        raise Problem("invalid-message", f"the body is not JSON: {error}") from error
    try:
        return message.validate_python(found)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from error


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members) > MAX_MEMBERS:
        raise Problem("invalid-message", f"an object has {len(members)} members; at most {MAX_MEMBERS} are allowed")
    return dict(members)
