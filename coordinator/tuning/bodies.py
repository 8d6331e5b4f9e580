"""uvicorn's HTTP protocol with a short cut: a request's body goes straight into memory that the application provides.

By ASGI, every part of a body (64 KiB or more) is copied twice and wakes a task; of the event loop's work for large
bodies that was a third.
"""

import asyncio
from typing import cast

from starlette.requests import ClientDisconnect
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_INCOMING = "outerstep.incoming"  # in the scope of a request


class Protocol(HttpToolsProtocol):
    """The protocol with the short cut, for `uvicorn.Config(http=…)`."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["method"] == "PUT":
            cast(Scope, self.scope)[_INCOMING] = Incoming(self.cycle)

    def on_body(self, body: bytes) -> None:
        incoming = Incoming.of(cast(Scope, self.scope))
        if incoming is None or not incoming.take(body):
            super().on_body(body)


class Incoming:
    """The part of a request's body that has not been received yet."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._memory: memoryview | None = None
        self._received_bytes = 0

    @staticmethod
    def of(scope: Scope) -> "Incoming | None":
        """Return that of the request; None if its method is not PUT, or another server has made the scope."""
        incoming: Incoming | None = scope.get(_INCOMING)
        return incoming

    def take(self, piece: bytes) -> bool:
        """Copy the next bytes of the body into the memory; return False if none was provided."""
        if self._memory is None:
            return False
        start, self._received_bytes = self._received_bytes, self._received_bytes + len(piece)
        if self._received_bytes <= len(self._memory):
            self._memory[start : self._received_bytes] = piece
        return True

    async def into(self, memory: memoryview, idle_s: float) -> int:
        """Receive the rest of the body into `memory` and return its length; bytes beyond the memory's end are lost.

        To be called once `receive` has given the body's beginning. Raises TimeoutError if nothing arrives for `idle_s`
        (or up to twice as long), ClientDisconnect if the client is gone.
        """
        self._memory = memory
        self.take(bytes(self._cycle.body))
        self._cycle.body.clear()
        self._cycle.flow.resume_reading()
        try:
            await self._end(idle_s)
        finally:
            self._memory = None
        return self._received_bytes

    async def _end(self, idle_s: float) -> None:
        cycle = self._cycle
        while cycle.more_body and not cycle.disconnected:
            before = self._received_bytes
            cycle.message_event.clear()
            try:
                async with asyncio.timeout(idle_s):
                    await cycle.message_event.wait()  # set when the body is complete, and when the client is gone
            except TimeoutError:
                if self._received_bytes == before:
                    raise
        if cycle.disconnected:
            raise ClientDisconnect
