"""The line between one worker and the coordinator: slow, lossy, cut, and in no particular order.

An httpx transport: the client code above it is the real one. A request is on its way for a while, is served by a task
of the coordinator's process, and its answer travels back. On the way it may be lost (before or after the coordinator
acted on it), cut in the middle of its body, damaged, sent twice, or answered by a proxy.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import httpx

from tests.simulation.cluster import Cluster
from tests.simulation.coordinator_node import CoordinatorNode
from tests.simulation.world.primitives import Event
from tests.simulation.world.scheduler import Group, Scheduler
from tests.simulation.world.store import HOST, Answer, Headers

CONNECT_S = 10.0


@dataclass
class Weather:
    """How bad the lines are: the chance of each fault, per request."""

    lost: float = 0.0
    answer_lost: float = 0.0
    cut: float = 0.0
    damaged: float = 0.0
    twice: float = 0.0
    proxy: float = 0.0
    delay_s: float = 0.05


class Server(Protocol):
    """A process that answers requests while it is up."""

    @property
    def up(self) -> bool: ...

    @property
    def group(self) -> Group: ...

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer: ...


class Observer(Protocol):
    """Sees every request as the coordinator begins with it, and every answer as it is given."""

    def arrived(self, request: httpx.Request) -> bool: ...

    def served(self, request: httpx.Request, body: bytes, answer: Answer, good: bool) -> None: ...


class Line(httpx.BaseTransport):
    """One worker's. `cut_until`: a partition; nothing passes before then."""

    def __init__(
        self,
        scheduler: Scheduler,
        rng: random.Random,
        node: CoordinatorNode | Cluster,
        weather: Callable[[], Weather],
        observer: "Observer",
    ) -> None:
        self._scheduler, self._rng, self._node = scheduler, rng, node
        self._weather, self._observer = weather, observer
        self.cut_until = 0.0
        self.faults: dict[str, int] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        weather, body = self._weather(), b"".join(request.stream)  # type: ignore[arg-type]
        if self._cut():
            self._scheduler.sleep(CONNECT_S)
            raise httpx.ConnectTimeout("the line is cut", request=request)
        self._travel(weather)
        if request.url.host == HOST:
            return self._of_the_store(request, body, weather)
        if self._happens(weather.proxy, "proxy"):
            return httpx.Response(502, text="<html>Bad Gateway</html>", request=request)
        if self._happens(weather.lost, "lost") or self._cut():
            self._lose(request)
        server = self._node.door()
        if not server.up:
            raise httpx.ConnectError("connection refused", request=request)
        if body and self._happens(weather.cut, "cut upload"):
            self._serve(server, request, body[: self._rng.randrange(len(body))])
            raise httpx.WriteError("broken pipe", request=request)
        # Messages have no digest of their own: who damages them is for TCP and TLS to find.
        has_digest = "content-digest" in request.headers
        if has_digest and len(body) > 400 and self._happens(weather.damaged, "damaged upload"):
            place = self._rng.randrange(len(body))
            body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        if self._happens(weather.twice, "twice"):
            self._serve(server, request, body, delay_s=self._rng.expovariate(1 / 5.0))
        answer = self._await(request, self._serve(server, request, body))
        self._travel(weather)
        if self._happens(weather.answer_lost, "answer lost") or self._cut():
            self._lose(request)
        return self._response(request, answer, weather)

    def _of_the_store(self, request: httpx.Request, body: bytes, weather: Weather) -> httpx.Response:
        """The store's answer to a signed request, over the same line."""
        store = self._node.store
        assert store is not None
        if self._happens(weather.lost, "lost on the way to the store"):
            self._lose(request)
        if body and self._happens(weather.cut, "cut upload to the store"):
            raise httpx.WriteError("broken pipe", request=request)  # a store keeps nothing of a body that breaks off
        if len(body) > 400 and self._happens(weather.damaged, "damaged upload to the store"):
            place = self._rng.randrange(len(body))
            body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        answer = store.served(request, body)
        if body and self._happens(weather.twice, "upload to the store twice"):
            late = partial(store.served, request, body[: self._rng.randrange(len(body))])
            self._scheduler.spawn(late, "a late upload", delay_s=self._rng.expovariate(1 / 5.0))
        self._travel(weather)
        if self._happens(weather.answer_lost, "answer of the store lost"):
            self._lose(request)
        return self._response(request, answer, weather)

    def _serve(self, server: "Server", request: httpx.Request, body: bytes, delay_s: float = 0.0) -> "_Exchange":
        """A task of the server's process that answers the request."""
        exchange = _Exchange(Event(self._scheduler), server.group)
        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
        target = request.url.raw_path.decode()

        def act() -> None:
            if server.up:
                good = self._observer.arrived(request)
                exchange.answer = server.answer(request.method, target, headers, body)
                self._observer.served(request, body, exchange.answer, good)
            exchange.ended.set()

        self._scheduler.spawn(act, f"{request.method} {target}", exchange.group, delay_s)
        return exchange

    def _await(self, request: httpx.Request, exchange: "_Exchange") -> Answer:
        until = self._scheduler.now + _silence_s(request)
        while not exchange.ended.wait(min(1.0, until - self._scheduler.now)):
            if exchange.group.dead:
                raise httpx.ReadError("connection reset", request=request)
            if self._scheduler.now >= until:
                raise httpx.ReadTimeout("silence", request=request)
        if exchange.answer is None:
            raise httpx.ReadError("connection reset", request=request)
        return exchange.answer

    def _response(self, request: httpx.Request, answer: Answer, weather: Weather) -> httpx.Response:
        status, headers, body = answer
        if (
            status in (200, 206)
            and len(body) > 400
            and request.method == "GET"
            and b"json" not in dict(headers).get(b"content-type", b"")
        ):
            if self._happens(weather.cut, "cut download"):
                return httpx.Response(status, headers=headers, stream=_Cut(body[: self._rng.randrange(len(body))]))
            if self._happens(weather.damaged, "damaged download"):
                place = self._rng.randrange(len(body))
                body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body), request=request)

    def _travel(self, weather: Weather) -> None:
        self._scheduler.sleep(self._rng.expovariate(1 / weather.delay_s))

    def _cut(self) -> bool:
        return self._scheduler.now < self.cut_until

    def _happens(self, chance: float, what: str) -> bool:
        if chance == 0.0 or self._rng.random() >= chance:
            return False
        self.faults[what] = self.faults.get(what, 0) + 1
        return True

    def _lose(self, request: httpx.Request) -> None:
        """Sometimes the line says so at once, sometimes only the silence does."""
        if self._rng.random() < 0.7:
            raise httpx.ReadError("connection reset", request=request)
        self._scheduler.sleep(_silence_s(request))
        raise httpx.ReadTimeout("silence", request=request)


def _silence_s(request: httpx.Request) -> float:
    """For how long the client waits for a byte before it gives the request up."""
    return float(request.extensions["timeout"]["read"])


@dataclass
class _Exchange:
    ended: Event
    group: Group
    answer: Answer | None = None


class _Cut(httpx.SyncByteStream):
    """A body that breaks off."""

    def __init__(self, start: bytes) -> None:
        self._start = start

    def __iter__(self) -> Iterator[bytes]:
        yield self._start
        raise httpx.ReadError("connection reset in the middle of the body")
