"""The middleware around every route. A request passes it in this order (`api/app.py`):

PrepareRequest     gives the request an id, which is also logged with every line about it; HEAD becomes GET
RequestMetrics     counts and times the request (`api/metrics/server.py`)
ResponseHeaders    adds headers to every response, and answers unexpected exceptions
Admit              rejects clients of another protocol version, finds the token's holder, and limits its requests
"""

import asyncio
import re
import uuid

from fastapi import Request
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.problems import fault_response, reject
from coordinator.process import about_request
from coordinator.quotas import caller_of
from protocol.errors import Problem
from protocol.messages import Scope as TokenScope
from protocol.versions import OURS, client_version, incompatibility

REJECT_DELAY_S = 1.0  # before a 429: if clients retried at once, rejecting would cost as much as serving

_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

# Keys of the request's state.
_HEAD_ONLY, _ID, _HEADERS = "head_only", "request_id", "response_headers"


def needs_a_token(path: str) -> bool:
    """True for every path except health and documentation."""
    return path.startswith("/v1/") or path == "/metrics"


def is_head(scope: Scope) -> bool:
    """True if the client sent HEAD, so it gets no body."""
    return _HEAD_ONLY in scope.get("state", ())


def request_id(scope: Scope) -> str:
    """Return the request's id."""
    found: str = scope["state"][_ID]
    return found


def add_response_header(request: Request, name: str, value: str) -> None:
    """Add a header to the response to this request, even if the response is a problem."""
    request.scope.setdefault("state", {}).setdefault(_HEADERS, {})[name] = value


class PrepareRequest:
    """Gives each request an id, and answers HEAD wherever GET is answered (RFC 9110, section 9.3.2): with the same
    headers, and without the body, which uvicorn leaves out. Range is dropped, because it is defined for GET alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        found = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        scope = {**scope, "state": {**scope.get("state", {}), _ID: found}}
        if scope["method"] == "HEAD":
            headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
            scope |= {"method": "GET", "headers": headers}
            scope["state"][_HEAD_ONLY] = True
        with about_request(found, scope):
            await self._app(scope, receive, send)


class ResponseHeaders:
    """Adds X-Request-Id, X-Content-Type-Options, Cache-Control and the headers that a handler has added.

    Unexpected exceptions are answered here. Starlette's response to them lacks the id and drops the connection.
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
                if needs_a_token(scope["path"]):  # shared caches must not keep responses that need a token
                    headers.setdefault("Cache-Control", "private, no-store")
                headers.update(scope["state"].get(_HEADERS, {}))
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:  # every exception becomes a problem response
            if started:
                raise
            await fault_response(scope, request_id(scope), error)(scope, receive, send_with_headers)


class Admit:
    """Puts the bearer token's holder into `request.state.identity`, before the body is read. Answers 409 to a client
    that speaks another protocol version, 401 without a valid token, and 429 above its rate limit.

    The protocol comes first, because token formats may differ too. Health and documentation are open, so that such a
    client can find out the coordinator's version.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and needs_a_token(scope["path"]):
            try:
                await self._admit(scope)
            except Problem as problem:
                await reject(problem, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        difference = incompatibility(client_version(headers), OURS)
        if difference is not None:
            raise Problem("protocol-mismatch", difference)
        scheme, secret = get_authorization_scheme_param(headers.get("authorization"))
        if scheme.lower() != "bearer" or not secret:
            raise Problem("unauthorized", "send a token: Authorization: Bearer TOKEN")
        coordinator = scope["app"].state.coordinator
        identity = coordinator.identify(secret)
        if identity is None:
            detail = "this token is unknown, was revoked, has expired, or belongs to a lease that has ended"
            raise Problem("unauthorized", detail)
        caller = caller_of(identity)
        if not identity.allows(TokenScope.ADMIN):
            try:
                coordinator.quotas.rates.take(caller)
            except Problem:
                await asyncio.sleep(REJECT_DELAY_S)
                raise
        scope["state"].update(identity=identity, caller=caller)
