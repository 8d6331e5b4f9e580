"""Limits on a connection before its client is known.

uvicorn's protocol accepts any number of connections, and request heads of any size that may take any time. This
subclass limits

- the number of connections, in all and per address (`ConnectionLimit`), from the first packet on, and the time of a
  TLS handshake;
- the bytes and lines of a request's head, and of everything else that is not body: trailers, chunk headers;
- the form of a request's target, which is a path, and the number of its Host headers;
- the time that a head may take, from the connection's start or from the response before;
- the requests that are pipelined ahead of their responses;
- how slowly the rest of a body may arrive after its response was sent;
- the time that a response may stay unread.

Bodies that a handler reads have their limits in `bodies.py`.

uvicorn has no public interface for this, so the class relies on internals of `HttpToolsProtocol`. `pyproject.toml`
caps uvicorn's version. Before raising it, run tests/coordinator/test_connections.py, which has a test of each limit.
"""

import asyncio
import json
import logging
import re
import ssl
import types
import uuid
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from typing import Any, NoReturn, TypeVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from coordinator.http.bodies import MinimumRate
from coordinator.http.connection_limit import ConnectionLimit
from coordinator.settings import Settings
from protocol.errors import Problem
from protocol.text import printable

MAX_PIPELINED = 16  # requests on one connection that wait for the response to an earlier one
RETRY_S = 5.0  # Retry-After when there are too many connections

# A coordinator is no proxy, so it accepts only the origin form of a target (RFC 9112, section 3.2.1).
NO_PATH = "the request's target must begin with / and have visible ASCII characters alone, as in GET /v1/runs HTTP/1.1"
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")  # a host and a port (RFC 3986, section 3.2)

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """One connection. A deadline runs in two cases: a request's head is expected or incomplete, or the rest of a body
    arrives although its response was already sent."""

    def __init__(
        self, *arguments: Any, limit: ConnectionLimit, settings: Settings, tls: ssl.SSLContext | None, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._limit, self._settings, self._tls = limit, settings, tls
        self._raw: asyncio.Transport | None = None  # until the TLS handshake is done
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""  # bytes received together with the end of the handshake
        self._refusal: Problem | None = None  # why the parser was stopped
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._rate: MinimumRate | None = None  # for a body that is discarded
        self._in_head = self._in_body = self._progressed = False
        self._overhead_bytes = self._lines = self._line_bytes = 0

    # --- open and close -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = get_remote_addr(transport)
        refusal = self._limit.admit(self, peer[0] if peer else "")
        if self._tls is None:
            super().connection_made(transport)
            if refusal is None:
                self._await_head()
            else:
                self._reject(Problem("not-ready", refusal, retry_after_s=RETRY_S))
        elif refusal is None:
            self._raw = transport
            handshake = self.loop.start_tls(
                transport, self, self._tls, server_side=True, ssl_handshake_timeout=self._settings.head_s
            )
            # The next bytes belong to TLS and may arrive before a task would start.
            self._handshake = self.loop.create_task(self._shake_hands(_started(handshake)))
        else:
            self._limit.refused["not-ready"] += 1
            transport.abort()  # a response would need a handshake

    async def _shake_hands(self, handshake: Awaitable[asyncio.Transport | None]) -> None:
        """Finish the TLS handshake. uvicorn's own server would count a connection only after the handshake."""
        try:
            secured = await handshake
            if secured is None or secured.is_closing():
                raise ConnectionAbortedError("the connection was closed meanwhile")
        except BaseException as error:
            self._limit.remove(self)
            if self._raw is not None:
                self._raw.abort()
            if not isinstance(error, OSError):
                raise
            logger.debug("TLS handshake failed: %s", error)
            return
        super().connection_made(secured)
        self._raw, early = None, self._early
        self._await_head()
        if early:
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.remove(self)
        self._end_deadline()
        self._end_unread()
        if self._raw is None:
            super().connection_lost(exc)

    def close_idle(self) -> None:
        """Close the connection to admit another. The limit calls this only while no request is in progress on it."""
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
        self._progressed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # upgrades are not supported; the request is answered like any other
        except httptools.HttpParserError as error:
            if self._refusal is None:
                is_url = isinstance(error, httptools.HttpParserInvalidURLError)
                self._refusal = _invalid(NO_PATH if is_url else f"this is not HTTP/1.1: {printable(str(error))}")
            self._reject(self._refusal)
            return
        if not self._progressed:
            self._overhead_bytes += len(data)
            if self._overhead_bytes > self._settings.max_head_bytes:
                self._reject(self._head_too_large())

    # --- the parser's callbacks -----------------------------------------------------------------------------------

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
            self._stop_parser(self._head_too_large())

    def _stop_parser(self, refusal: Problem) -> NoReturn:
        self._refusal = refusal
        raise ValueError(refusal.detail)

    def on_headers_complete(self) -> None:
        if not self.url.startswith(b"/"):
            self._stop_parser(_invalid(NO_PATH))
        hosts = [value for name, value in self.headers if name == b"host"]
        is_old = self.parser.get_http_version() == "1.0"
        if len(hosts) > 1 or not (hosts or is_old):
            self._stop_parser(_invalid(f"a request has exactly one Host header; this one has {len(hosts) or 'none'}"))
        if not all(map(_HOST.fullmatch, hosts)):
            self._stop_parser(_invalid("the Host header is not HOST or HOST:PORT"))
        self._in_head, self._in_body = False, True
        self._note_progress()
        self._end_deadline()
        self._limit.busy(self)
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._note_progress()
        if self._rate is not None and not self._rate.arrived(len(body), self.loop.time()):
            self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._rate is not None:
            self._end_deadline()
        super().on_message_complete()
        if self.cycle.response_complete:  # the keep-alive timeout starts only now
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _note_progress(self) -> None:
        self._progressed, self._overhead_bytes = True, 0

    # --- responses ------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:
            self.cycle.body = bytearray()  # the part that no handler has read
        super().on_response_complete()
        if self.transport.is_closing() or self.pipeline or not self.cycle.response_complete:
            return
        self._limit.idle(self)
        if self._in_body:
            self._await_rest_of_body()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._end_unread()
        super().resume_writing()

    def _reject(self, problem: Problem) -> None:
        """Answer with the problem, unless an earlier request is not answered or this one partly, and close the
        connection."""
        self._limit.refused[problem.slug] += 1
        in_turn = self.cycle is None or self.cycle.response_complete
        if in_turn or (self._in_body and not self.cycle.response_started and not self.pipeline):
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
        self._deadline = self.loop.call_later(self._settings.head_s, self._head_timeout)

    def _head_timeout(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # the head may have arrived without being read
            self._await_head()
        elif self._in_head:
            detail = f"the request's headers took longer than {self._settings.head_s:g} s"
            self._reject(Problem("request-timeout", detail))
        else:
            self.transport.close()

    def _await_rest_of_body(self) -> None:
        """Close the connection if the rest of a discarded body arrives too slowly."""
        idle_s, now = self._settings.upload_idle_s, self.loop.time()
        self._rate = self._rate or MinimumRate(self._settings.min_body_bytes_per_s, idle_s, now)
        self._deadline = self.loop.call_later(idle_s, self._rest_of_body_timeout)

    def _rest_of_body_timeout(self) -> None:
        self._deadline = None
        if self._rate is None or not self._rate.arrived(0, self.loop.time()):
            self.transport.close()
        else:
            self._await_rest_of_body()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._rate = None

    def _await_reading(self, unread: int) -> None:
        self._unread_timer = self.loop.call_later(self._settings.upload_idle_s, partial(self._unread_timeout, unread))

    def _unread_timeout(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread >= before:
            self.transport.abort()
        else:
            self._await_reading(unread)

    def _end_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._unread_timer = None


def _invalid(detail: str) -> Problem:
    return Problem("invalid-request", detail)


def _started(coroutine: Coroutine[Any, Any, Result]) -> Awaitable[Result]:
    """Run a coroutine up to its first suspension. Await the result to run the rest."""
    first = coroutine.send(None)

    @types.coroutine
    def rest() -> Generator[Any, Any, Result]:
        yield first
        result: Result = yield from coroutine
        return result

    return rest()
