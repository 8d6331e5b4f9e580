"""Authentication, before anything else: without a token not even the body of a request is read."""

from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.http.problems import refuse
from protocol.errors import Problem


class Authenticate:
    """Middleware that finds the holder of the bearer token and puts it into `request.state.identity`, or answers 401.

    Only addresses under /v1 need a token; health and documentation are for everybody.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        scheme, secret = get_authorization_scheme_param(Headers(scope=scope).get("authorization"))
        if scheme.lower() != "bearer" or not secret:
            await refuse(Problem("unauthorized", "send a token: Authorization: Bearer TOKEN"), scope, receive, send)
            return
        identity = scope["app"].state.coordinator.identify(secret)
        if identity is None:
            detail = "this token is unknown, was revoked, or belongs to a lease that has ended"
            await refuse(Problem("unauthorized", detail), scope, receive, send)
            return
        scope.setdefault("state", {})["identity"] = identity
        await self._app(scope, receive, send)
