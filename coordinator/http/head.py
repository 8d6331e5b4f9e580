"""HEAD: everywhere where GET is answered, with the same headers and without the body (RFC 9110, section 9.3.2)."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEAD_ONLY = "head_only"  # among the request's state


def wants_head_only(scope: Scope) -> bool:
    """Return True if the client asked with HEAD, and so will not see the answer's body."""
    return bool(scope.get("state", {}).get(_HEAD_ONLY))


class AnswerHead:
    """Middleware that answers HEAD as GET without the body; and without Range, which is defined for GET alone.

    Once the headers are sent, the application is told that the client is gone: so a stream of events ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif not answered.is_set():
                answered.set()
                await send({"type": "http.response.body", "body": b""})

        async def receive_disconnect() -> Message:
            await answered.wait()
            return {"type": "http.disconnect"}

        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        state = {**scope.get("state", {}), _HEAD_ONLY: True}
        as_get = {**scope, "method": "GET", "headers": headers, "state": state}
        await self._app(as_get, receive_disconnect, send_head)
