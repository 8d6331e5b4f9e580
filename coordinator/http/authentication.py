"""Authentication, before anything else: without a token not even the body of a request is read."""

import asyncio

from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from coordinator.callers import caller_of
from coordinator.http.problems import refuse
from protocol.errors import Problem
from protocol.messages import Scope

REFUSED_IN_S = 1.0  # who is to ask again later is not told at once


def needs_a_token(path: str) -> bool:
    """Return True of all addresses but those of health and documentation."""
    return path.startswith("/v1/") or path == "/metrics"


class Authenticate:
    """Middleware that finds the holder of the bearer token and puts it into `request.state.identity`, or answers 401;
    429 if it sends too many requests.

    Health and documentation are for everybody.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not needs_a_token(scope["path"]):
            await self._app(scope, receive, send)
            return
        scheme, secret = get_authorization_scheme_param(Headers(scope=scope).get("authorization"))
        if scheme.lower() != "bearer" or not secret:
            await refuse(Problem("unauthorized", "send a token: Authorization: Bearer TOKEN"), scope, receive, send)
            return
        coordinator = scope["app"].state.coordinator
        identity = coordinator.identify(secret)
        if identity is None:
            detail = "this token is unknown, was revoked, has expired, or belongs to a lease that has ended"
            await refuse(Problem("unauthorized", detail), scope, receive, send)
            return
        caller = caller_of(identity)
        if not identity.allows(Scope.ADMIN):
            try:
                coordinator.callers.rates.take(caller)
            except Problem as problem:
                await asyncio.sleep(REFUSED_IN_S)  # or refusing would cost as much as answering
                await refuse(problem, scope, receive, send)
                return
        scope.setdefault("state", {}).update(identity=identity, caller=caller)
        await self._app(scope, receive, send)
