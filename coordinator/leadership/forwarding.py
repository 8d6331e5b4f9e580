"""What a coordinator does with requests: the leader answers them, and a standby forwards them to the leader.

A forwarded request carries a ticket that only coordinators of this database can make (`tickets.py`). So the leader
believes the client's address that a standby reports, and a coordinator that has lost the lease does not forward a
request a second time. It goes to the leader's address and nowhere else, with the client's own target.

The bytes of deltas and checkpoints do not pass the leader. It decides whether the client may have a blob, and names it
to the standby, which reads it from the store.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import httpx
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.http.bodies import chunks
from coordinator.http.connections import NO_PATH
from coordinator.http.downloads import BLOB_HEADER, BY_STANDBY, blob_response
from coordinator.http.middleware import PrepareRequest, ResponseHeaders, is_head, request_id
from coordinator.http.problems import reject, rejection
from coordinator.leadership.standby import Standby, unready, vacant
from coordinator.leadership.terms import Terms
from coordinator.leadership.tickets import Ticket, blob_names
from coordinator.settings import Settings
from coordinator.store.blobs import Blobs, StoredBlob
from outerstep.common.connections import error_text
from protocol.errors import OuterstepError, Problem
from protocol.versions import RESPONSE_HEADERS

TICKET_HEADER = "outerstep-forwarded"
CONNECT_S, SILENT_S = 3.0, 90.0  # a long poll takes up to 60 s

# Headers about one connection (RFC 9110, section 7.6.1).
_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",  # replaced by the request's id
        TICKET_HEADER,
        BLOB_HEADER.lower(),
        # The leader would believe these from a standby that is one of its `proxies`.
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-proto",
    }
)
# Headers that this server adds to every response by itself.
_OWN = frozenset({"date", "server", *(name.lower() for name in RESPONSE_HEADERS)})

logger = logging.getLogger(__name__)


class LeadOrForward:
    """The outermost application of a coordinator that shares its database."""

    def __init__(self, settings: Settings, terms: Terms, standby: Standby, blobs: Callable[[], Blobs]) -> None:
        """`standby` answers requests about this process while it does not lead. `blobs` opens those that this process
        reads meanwhile; it may raise OuterstepError and OSError."""
        self.terms, self._settings, self._standby, self._open_blobs = terms, settings, standby, blobs
        self._blobs: Blobs | None = None
        self._opening = asyncio.Lock()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, follow_redirects=False)
        self._closing = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        ticket = self._ticket(scope)
        if ticket is not None:
            scope = _from_client(scope, ticket)
        app: ASGIApp | None = self.terms.app
        if app is not None and (ticket is None or self._is_mine(ticket)):
            await app(scope, receive, send)
            return

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if ticket is not None:
                fault = self.terms.fault or "another one led when the request was forwarded"
                await reject(vacant(fault), scope, receive, send)
            elif await self._standby.answers(scope):
                await self._standby(scope, receive, send)
            else:
                # A standby that cannot reach the store would let the client wait for it.
                can_send = _method(scope) == "GET" and not self.terms.election.store_fault
                await self._forward(scope, receive, send, offer=can_send)

        await PrepareRequest(ResponseHeaders(answer))(scope, receive, send)

    def _ticket(self, scope: Scope) -> Ticket | None:
        """Return the ticket of a request that another coordinator of the database has forwarded; otherwise None."""
        known, value = self.terms.election.leader, Headers(scope=scope).get(TICKET_HEADER)
        return None if known is None or value is None else Ticket.read(value, known.secret)

    def _is_mine(self, ticket: Ticket) -> bool:
        """Return True if the ticket is for this coordinator, in its current term."""
        fence = self.terms.election.fence
        return fence is not None and (ticket.leader, ticket.term) == (fence.holder, fence.token)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        async with self.terms.running(), self._client:
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            self._closing.set()
        await send({"type": "lifespan.shutdown.complete"})

    def stop_waiting(self) -> None:
        """Let the requests that wait end, because the process is about to stop."""
        self._closing.set()
        self.terms.stop_waiting()

    # --- forwarding ---------------------------------------------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send, *, offer: bool) -> None:
        """Forward the request. `offer`: to send the blob that it asks for."""
        leader = self.terms.leader
        if leader is None or leader.holder is None or leader.address is None:
            await reject(vacant(self.terms.fault or self.terms.election.fault), scope, receive, send)
            return
        if self.terms.unreachable:
            await reject(unready(self.terms.unreachable), scope, receive, send)
            return
        offers = offer and blob_names(scope["path"]) is not None
        client = scope["client"][0] if scope.get("client") else None
        ticket = Ticket(leader.secret, leader.holder, leader.token, secrets.token_hex(16), offers, client)
        body = _Body(scope, receive, self._settings)
        try:
            request = request_to(leader.address, scope, ticket, body.pieces() if body.expected else None)
        except Problem as refusal:
            await reject(refusal, scope, receive, send)
            return
        answer = _Answer(send, partial(ticket.blob, path=scope["path"]))
        ended = asyncio.create_task(answer.pass_on(self._client, request))
        gone = asyncio.create_task(body.disconnected())
        # A paused leader would keep the connection open.
        over = [asyncio.create_task(each.wait()) for each in (self.terms.replaced, self._closing)]
        problem: Problem | None = unready("another coordinator leads now, or this one stops")
        try:
            await asyncio.wait({ended, gone, *over}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                problem = ended.result()
            elif gone.done():
                return
        finally:
            for task in (ended, gone, *over):
                task.cancel()
            await asyncio.gather(ended, gone, *over, return_exceptions=True)
        if answer.blob is not None:
            if not await self._send_blob(answer.blob, answer.beside_blob, scope, receive, send):
                await self._forward(scope, receive, send, offer=False)
            return
        if problem is None:
            return
        if answer.begun:
            await answer.cut(problem)
            return
        if answer.refused:
            self.terms.refused_at = time.monotonic()
        response = rejection(problem, Headers(scope=scope))
        response.headers["Connection"] = "close"  # the next one goes through the load balancer, perhaps to the leader
        await response(scope, receive, send)

    async def _send_blob(
        self, stored: StoredBlob, headers: list[tuple[bytes, bytes]], scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Send the requested part of a blob, with these headers where it has none of its own. Return False, and send
        nothing, if it cannot be read here."""
        try:
            async with self._opening:
                if self._blobs is None:
                    self._blobs = await run_in_threadpool(self._open_blobs)
                blobs = self._blobs
            missing = partial(Problem, "not-found", "the store does not have it")
            response = await run_in_threadpool(blob_response, Request(scope), blobs, stored, missing)
        except (OuterstepError, OSError) as error:
            logger.info("the leader sends %s, because this standby cannot read it: %s", stored.name, error)
            return False
        for name, value in headers:
            response.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        await response(scope, receive, send)
        return True


def request_to(
    address: str, scope: Scope, ticket: Ticket, content: AsyncIterator[bytes] | None = None
) -> httpx.Request:
    """Return the request of `scope` as it is forwarded to the coordinator at `address`, with the client's target as it
    is. Not made by the client that sends it, which would add headers of its own. Raises Problem if the target is no
    path.
    """
    target: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    if not target.startswith(b"/"):
        raise Problem("invalid-request", NO_PATH)
    kept = [(name, value) for name, value in scope["headers"] if name.decode("latin-1").lower() not in _HOP]
    ours = [
        (b"x-request-id", request_id(scope).encode()),  # so the leader logs the same one
        (TICKET_HEADER.encode(), ticket.header().encode("latin-1")),
    ]
    extensions = {"target": target}
    return httpx.Request(_method(scope), address, headers=[*kept, *ours], content=content, extensions=extensions)


class _Answer:
    """The leader's answer, on its way to the client. `blob`: what the client gets from this process instead, with the
    headers `beside_blob`."""

    def __init__(self, send: Send, named: Callable[[str], StoredBlob | None]) -> None:
        """`named` returns the blob that a header names; None if the header is not the leader's."""
        self.blob: StoredBlob | None = None
        self.beside_blob: list[tuple[bytes, bytes]] = []
        self.begun = False
        self.refused = False  # True if no connection to the leader could be made
        self._send, self._named = send, named
        self._length: str | None = None

    async def pass_on(self, client: httpx.AsyncClient, request: httpx.Request) -> Problem | None:
        """Pass it on. Return a problem if the leader does not answer, or not to the end."""
        try:
            response = await client.send(request, stream=True)
            try:
                left_out = _HOP | _OWN
                headers = [each for each in response.headers.raw if each[0].decode("latin-1").lower() not in left_out]
                if (value := response.headers.get(BLOB_HEADER)) is not None:
                    self.blob, self.beside_blob = self._named(value), headers
                    if self.blob is None:
                        logger.warning("what answers at %s names a blob without the leader's proof", request.url.host)
                        return unready("what answers at the leader's address is not the leader")
                    return None
                self._length = response.headers.get("content-length")
                self.begun = True
                await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                async for piece in response.aiter_raw():
                    await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                await self._send({"type": "http.response.body", "body": b""})
            finally:
                await response.aclose()
        except Problem as problem:  # the body has stalled
            return problem
        except ClientDisconnect:
            return None
        except httpx.HTTPError as error:
            logger.info("the leader at %s does not answer: %s", request.url.host, error_text(error, trust_env=False))
            self.refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            return unready(f"the leader does not answer: {error_text(error, trust_env=False)}")
        return None

    async def cut(self, problem: Problem) -> None:
        """End an answer that has begun. A stream just ends. Raises the problem if the client expects more bytes, so
        that the server closes the connection."""
        if self._length is not None:
            raise problem
        await self._send({"type": "http.response.body", "body": b""})


class _Body:
    """The body of a request, which is read while it is forwarded; and after it, the client's disconnect."""

    def __init__(self, scope: Scope, receive: Receive, settings: Settings) -> None:
        headers = Headers(scope=scope)
        self.expected = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self._request, self._receive, self._settings = Request(scope, receive), receive, settings
        self._read, self._gone = asyncio.Event(), asyncio.Event()
        if not self.expected:
            self._read.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises Problem `request-timeout`, and ClientDisconnect."""
        try:
            async for piece in chunks(self._request, self._settings):
                yield piece
        except ClientDisconnect:
            self._gone.set()
            raise
        self._read.set()

    async def disconnected(self) -> None:
        """Return once the client has disconnected."""
        gone = asyncio.create_task(self._gone.wait())
        read = asyncio.create_task(self._read.wait())
        try:
            await asyncio.wait({gone, read}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            read.cancel()
        while not self._gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._gone.set()


def _method(scope: Scope) -> str:
    return "HEAD" if is_head(scope) else str(scope["method"])


def _from_client(scope: Scope, ticket: Ticket) -> Scope:
    """Return the scope of a forwarded request, with its client's address in place of the standby's."""
    scope = {**scope, "client": None if ticket.client is None else (ticket.client, 0)}
    return {**scope, BY_STANDBY: ticket.named} if ticket.offers else scope
