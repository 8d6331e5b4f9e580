"""The id of a request: the one that it came with, from a client or a proxy, if that is decent; or a new one."""

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.logs import about_request

_DECENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ID = "request_id"  # among the request's state


def request_id(scope: Scope) -> str:
    """Return the request's id."""
    found: str = scope["state"][_ID]
    return found


class Identify:
    """Middleware that gives each request its id, which whatever is logged meanwhile has too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        found = given if _DECENT.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[_ID] = found
        with about_request(found, scope):
            await self._app(scope, receive, send)
