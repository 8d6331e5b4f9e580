"""What a coordinator does with requests: the leader answers them, and a standby forwards them to the leader.

A forwarded request carries a key that only coordinators of this database know. So the leader believes the client's
address that a standby reports, and a coordinator that has lost the lease does not forward a request a second time.

The bytes of deltas and checkpoints do not pass the leader. It decides whether the client may have a blob, and names it
to the standby, which reads it from the store.
"""

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial

import httpx
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.bodies import chunks
from coordinator.http.downloads import BLOB_HEADER, BY_STANDBY, blob_response, named_blob
from coordinator.http.problems import reject, rejection
from coordinator.leadership.standby import Standby, unready, vacant
from coordinator.leadership.terms import Terms
from coordinator.settings import Settings
from coordinator.store.blobs import Blobs, StoredBlob
from outerstep.common.connections import error_text
from protocol.errors import OuterstepError, Problem
from protocol.versions import RESPONSE_HEADERS

KEY_HEADER = "outerstep-forwarded"
OFFER_HEADER = "outerstep-by-standby"  # the standby sends the blob if the leader names it
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
        KEY_HEADER,
        OFFER_HEADER,
        BLOB_HEADER.lower(),
        "x-forwarded-for",
    }
)

# Headers that this server adds to every response by itself.
_OWN = frozenset({"date", "server", *(name.lower() for name in RESPONSE_HEADERS)})

logger = logging.getLogger(__name__)


def forwarding_key(secret: bytes) -> str:
    """Return the key that coordinators with this secret in their database show each other."""
    return hmac.new(secret, b"outerstep forwarded request", hashlib.sha256).hexdigest()


class LeadOrForward:
    """The outermost application of a coordinator that shares its database."""

    def __init__(
        self, settings: Settings, terms: Terms, key: str, standby: Standby, blobs: Callable[[], Blobs]
    ) -> None:
        """`key`: of forwarded requests. `standby` answers requests about this process while it does not lead. `blobs`
        returns the blobs that this process reads meanwhile; it may raise OuterstepError and OSError."""
        self.terms, self._settings, self._key, self._standby, self._blobs = terms, settings, key, standby, blobs
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, follow_redirects=False)
        self._closing = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        shown = Headers(scope=scope).get(KEY_HEADER, "")
        forwarded = hmac.compare_digest(shown.encode("latin-1"), self._key.encode())
        if forwarded:
            scope = _from_client(scope)
        app: ASGIApp | None = self.terms.app
        if app is not None:
            await app(scope, receive, send)
            return
        scope, send = _identified(scope, send)
        if await self._standby.answers(scope):
            await self._standby(scope, receive, send)
        elif forwarded:
            await reject(vacant("it led when the request was forwarded"), scope, receive, send)
        else:
            # A standby that cannot reach the store would let the client wait for it.
            can_send = scope["method"] == "GET" and not self.terms.election.store_fault
            await self._forward(scope, receive, send, offer=can_send)

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
        if leader is None or leader.address is None:
            await reject(vacant(self.terms.fault or self.terms.election.fault), scope, receive, send)
            return
        if self.terms.unreachable:
            await reject(unready(self.terms.unreachable), scope, receive, send)
            return
        body = _Body(scope, receive, self._settings)
        request = self._client.build_request(
            scope["method"],
            leader.address + scope["raw_path"].decode("ascii"),
            params=scope["query_string"] or None,
            headers=self._headers(scope, offer=offer),
            content=body.pieces() if body.expected else None,
        )
        answer = _Answer(send)
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
            blobs = await run_in_threadpool(self._blobs)
            missing = partial(Problem, "not-found", "the store does not have it")
            response = await run_in_threadpool(blob_response, Request(scope), blobs, stored, missing)
        except (OuterstepError, OSError) as error:
            logger.info("the leader sends %s, because this standby cannot read it: %s", stored.name, error)
            return False
        for name, value in headers:
            response.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        await response(scope, receive, send)
        return True

    def _headers(self, scope: Scope, *, offer: bool) -> list[tuple[bytes, bytes]]:
        kept = [(name, value) for name, value in scope["headers"] if name.decode("latin-1").lower() not in _HOP]
        client = scope.get("client")
        if client:
            kept.append((b"x-forwarded-for", client[0].encode()))
        if offer:
            kept.append((OFFER_HEADER.encode(), b"1"))
        return [*kept, (KEY_HEADER.encode(), self._key.encode())]


class _Answer:
    """The leader's answer, on its way to the client. `blob`: what the client gets from this process instead, with the
    headers `beside_blob`."""

    def __init__(self, send: Send) -> None:
        self.blob: StoredBlob | None = None
        self.beside_blob: list[tuple[bytes, bytes]] = []
        self.begun = False
        self.refused = False  # True if no connection to the leader could be made
        self._send = send
        self._length: str | None = None

    async def pass_on(self, client: httpx.AsyncClient, request: httpx.Request) -> Problem | None:
        """Pass it on. Return a problem if the leader does not answer, or not to the end."""
        try:
            response = await client.send(request, stream=True)
            try:
                left_out = _HOP | _OWN
                headers = [each for each in response.headers.raw if each[0].decode("latin-1").lower() not in left_out]
                if (blob := named_blob(response.headers)) is not None:
                    self.blob, self.beside_blob = blob, headers
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
            logger.info("the leader at %s does not answer: %s", request.url.host, error_text(error))
            self.refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            return unready(f"the leader does not answer: {error_text(error)}")
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


def _identified(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Give the request an id. The leader logs the same id, and every answer has it, also one of this process. So has
    every answer the header that keeps browsers from guessing its type."""
    name, headers = b"x-request-id", scope["headers"]
    sure = (b"x-content-type-options", b"nosniff")
    given = next((value for key, value in headers if key.lower() == name), uuid.uuid4().hex.encode())

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [each for each in message["headers"] if each[0].lower() not in (name, sure[0])]
            message = {**message, "headers": [*others, sure, (name, given)]}
        await send(message)

    others = [each for each in headers if each[0].lower() != name]
    return {**scope, "headers": [*others, (name, given)]}, send_with_id


def _from_client(scope: Scope) -> Scope:
    """Return the scope of a forwarded request, with its client's address in place of the standby's."""
    headers = Headers(scope=scope)
    if address := headers.get("x-forwarded-for", ""):
        scope = {**scope, "client": (address, 0)}
    return {**scope, BY_STANDBY: True} if OFFER_HEADER in headers else scope
