"""Connections, bounded before anything is known of who opened them.

uvicorn's protocol takes as many connections as come, and heads of any size for as long as they like. This one bounds

- how many there are, in all and of one address (`Gate`), from the first packet on, and how long a handshake may take;
- the bytes and lines of a head, and of whatever else is no body: trailers, and what surrounds chunks;
- how long a head may take, from the first byte of its connection or after the answer before;
- requests that are sent ahead of the answers;
- how slowly a body may come of which nobody wants to know any more;
- how long an answer may lie unread.

Bodies that somebody waits for have their bounds in `arriving.py`.
"""

import asyncio
import json
import logging
import ssl
import types
import uuid
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from coordinator.http.arriving import Pace
from coordinator.http.gate import Gate
from coordinator.settings import Settings
from protocol.errors import Problem

MAX_AHEAD = 16  # requests that wait for the answer to another of their connection
RETRY_S = 5.0  # after which a connection may be taken

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """One connection. A deadline runs while it has no request to be answered but the beginning of one, or the rest of
    one that is answered already."""

    def __init__(
        self, *arguments: Any, gate: Gate, settings: Settings, tls: ssl.SSLContext | None, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._gate, self._settings, self._tls = gate, settings, tls
        self._raw: asyncio.Transport | None = None  # until the handshake is done
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""  # what has come with the handshake's end
        self._too_large: Problem | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._pace: Pace | None = None  # of a body that nobody wants
        self._in_head = self._in_body = self._moved_on = False
        self._apart_bytes = self._lines = self._line_bytes = 0

    # --- its life -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = get_remote_addr(transport)
        refusal = self._gate.enter(self, peer[0] if peer else "")
        if self._tls is None:
            super().connection_made(transport)
            if refusal is None:
                self._await_head()
            else:
                self._refuse(Problem("not-ready", refusal, retry_after_s=RETRY_S))
        elif refusal is None:
            self._raw = transport
            shaking = self.loop.start_tls(
                transport, self, self._tls, server_side=True, ssl_handshake_timeout=self._settings.head_s
            )
            # What comes from now on is for TLS, before a task could begin.
            self._handshake = self.loop.create_task(self._shake_hands(_begun(shaking)))
        else:
            self._gate.refused["not-ready"] += 1
            transport.abort()  # to tell why would take a handshake

    async def _shake_hands(self, shaking: Awaitable[asyncio.Transport | None]) -> None:
        """Go on by TLS. It is not left to uvicorn's server, which begins to count only when the handshake is done."""
        try:
            secured = await shaking
            if secured is None or secured.is_closing():
                raise ConnectionAbortedError("it was closed meanwhile")
        except BaseException as error:
            self._gate.leave(self)
            if self._raw is not None:
                self._raw.abort()
            if not isinstance(error, OSError):
                raise
            logger.debug("no handshake: %s", error)
            return
        super().connection_made(secured)
        self._raw, early = None, self._early
        self._await_head()
        if early:
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self)
        self._end_deadline()
        self._end_unread()
        if self._raw is None:
            super().connection_lost(exc)

    def make_room(self) -> None:
        """Be closed for the sake of another: called by the gate, while no request is answered here."""
        (self._raw or self.transport).close()

    def data_received(self, data: bytes) -> None:
        if self._raw is not None:
            self._early += data
            return
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if not self._in_body and self._deadline is None:
            self._await_head()
        self._moved_on = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to what is not spoken here; the request is answered as any other
        except httptools.HttpParserError:
            if self._too_large is not None:
                self._refuse(self._too_large)
            else:
                self.send_400_response("Invalid HTTP request received.")
            return
        if not self._moved_on:
            self._apart_bytes += len(data)
            if self._apart_bytes > self._settings.max_head_bytes:
                self._refuse(self._head_too_large())

    # --- what the parser finds ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._lines = self._line_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._line_bytes += size
        if self._line_bytes > self._settings.max_head_bytes or self._lines > self._settings.max_head_lines:
            self._too_large = self._head_too_large()
            raise ValueError(self._too_large.detail)  # ends the parsing

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._move_on()
        self._end_deadline()
        self._gate.work(self)
        super().on_headers_complete()
        if len(self.pipeline) > MAX_AHEAD:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._move_on()
        if self._pace is not None and not self._pace.arrived(len(body), self.loop.time()):
            self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._pace is not None:
            self._end_deadline()
        super().on_message_complete()
        if self.cycle.response_complete:  # the pause before the next request begins only now
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _move_on(self) -> None:
        self._moved_on, self._apart_bytes = True, 0

    # --- answers --------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:
            self.cycle.body = bytearray()  # what of it nobody has read
        super().on_response_complete()
        if self.transport.is_closing() or self.pipeline or not self.cycle.response_complete:
            return
        self._gate.rest(self)
        if self._in_body:
            self._await_rest_of_body()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._end_unread()
        super().resume_writing()

    def _refuse(self, problem: Problem) -> None:
        """Answer, unless another answer is on its way, and close the connection."""
        self._gate.refused[problem.slug] += 1
        if self.cycle is None or self.cycle.response_complete:
            content = json.dumps(problem.document()).encode()
            lines = {
                b"content-type": b"application/problem+json",
                b"content-length": b"%d" % len(content),
                b"x-content-type-options": b"nosniff",
                b"x-request-id": uuid.uuid4().hex.encode(),
                b"connection": b"close",
            }
            if problem.retry_after_s is not None:
                lines[b"retry-after"] = b"%d" % problem.retry_after_s
            head = b"".join(b"%s: %s\r\n" % each for each in [*self.server_state.default_headers, *lines.items()])
            self.transport.write(STATUS_LINE[problem.status] + head + b"\r\n" + content)
        self.transport.close()

    def _head_too_large(self) -> Problem:
        most, lines = self._settings.max_head_bytes, self._settings.max_head_lines
        return Problem("head-too-large", f"a request's line and headers have at most {most} bytes and {lines} lines")

    # --- deadlines ------------------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self._settings.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # what is late lies here
            self._await_head()
        elif self._in_head:
            detail = f"the request's headers took longer than {self._settings.head_s:g} s"
            self._refuse(Problem("request-timeout", detail))
        else:
            self.transport.close()

    def _await_rest_of_body(self) -> None:
        """Give up the rest of a body that is discarded, if it comes too slowly."""
        idle_s, now = self._settings.upload_idle_s, self.loop.time()
        self._pace = self._pace or Pace(self._settings.min_body_bytes_per_s, idle_s, now)
        self._deadline = self.loop.call_later(idle_s, self._rest_of_body_is_late)

    def _rest_of_body_is_late(self) -> None:
        self._deadline = None
        if self._pace is None or not self._pace.arrived(0, self.loop.time()):
            self.transport.close()
        else:
            self._await_rest_of_body()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._pace = None

    def _await_reading(self, unread: int) -> None:
        self._unread = self.loop.call_later(self._settings.upload_idle_s, partial(self._not_read, unread))

    def _not_read(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread >= before:
            self.transport.abort()
        else:
            self._await_reading(unread)

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None


def _begun(coroutine: Coroutine[Any, Any, Result]) -> Awaitable[Result]:
    """Run a coroutine at once up to where it first waits; to wait for what is returned runs the rest."""
    first = coroutine.send(None)

    @types.coroutine
    def rest() -> Generator[Any, Any, Result]:
        yield first
        result: Result = yield from coroutine
        return result

    return rest()
