"""Middleware that refuses who speaks another protocol, before a token is looked at: tokens, too, could be others."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.http.authentication import needs_a_token
from coordinator.http.problems import refuse
from protocol.errors import Problem
from protocol.versions import OURS, client_version, incompatibility


class CheckProtocol:
    """Health and documentation are for everybody, so that a client of another version can ask which one this is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and needs_a_token(scope["path"]):
            difference = incompatibility(client_version(Headers(scope=scope)), OURS)
            if difference is not None:
                await refuse(Problem("protocol-mismatch", difference), scope, receive, send)
                return
        await self._app(scope, receive, send)
