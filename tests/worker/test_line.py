"""The line: what its connections are told, how much is on its way over them, and in which order fragments get it."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_server import Handler, serving
from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.line.connections import UNSENT_BYTES, Connections
from worker.line.line import Line
from worker.link.client import Client, open_http


def unsent_bytes(response: httpx.Response) -> int:
    """How much the connection of this answer takes without sending it."""
    connection = response.extensions["network_stream"].get_extra_info("socket")
    return int(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))


def test_a_line_that_carries_nothing_is_handed_little() -> None:
    """It was 2.9 MB, which the next body would have had to share the line with."""
    handed = 0

    def body() -> Iterator[bytes]:
        nonlocal handed
        for _ in range(256):
            yield bytes(1 << 15)
            handed += 1 << 15

    with socket.create_server(("127.0.0.1", 0)) as server:  # nobody reads there
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        length, trace = {"Content-Length": str(256 << 15)}, Connections().traced("up")
        with open_http(url) as http, pytest.raises(httpx.WriteTimeout):
            http.put("/", content=body(), headers=length, timeout=0.5, extensions=trace)
    assert 0 < handed < 1 << 20


@pytest.mark.slow
def test_the_proxies_of_the_environment_are_used_and_handed_little_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Proxy(Handler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # the connection stays open, to be asked

        def do_PUT(self) -> None:
            asked.append(self.path)
            self.created()

    trace = Connections().traced("up")
    with serving(Proxy) as url:
        with open_http(url) as http:
            assert unsent_bytes(http.put("/direct", extensions=trace)) == UNSENT_BYTES
        monkeypatch.setenv("http_proxy", url)
        with open_http("http://coordinator.invalid") as http:
            assert unsent_bytes(http.put("/through", extensions=trace)) == UNSENT_BYTES
    assert asked == ["/direct", "http://coordinator.invalid/through"]


def test_what_nobody_has_read_is_underway_and_all_connections_can_be_broken() -> None:
    connections, failed = Connections(), []

    def send(http: httpx.Client) -> None:
        try:
            http.put("/", content=bytes(64 << 20), extensions=connections.traced("up"))
        except httpx.TransportError as error:
            failed.append(error)

    with (
        socket.create_server(("127.0.0.1", 0)) as server,  # nobody reads there
        open_http(f"http://127.0.0.1:{server.getsockname()[1]}") as http,
    ):
        assert connections.unacknowledged_bytes() == 0
        sending = threading.Thread(target=send, args=[http])
        sending.start()
        wait_until(lambda: connections.unacknowledged_bytes() > 0)
        connections.abort()
        sending.join()
        assert len(failed) == 1
    assert connections.unacknowledged_bytes() == 0


def test_a_far_line_is_begun_with_more_connections() -> None:
    near, far = Line(), Line()
    for seconds in (0.3, 0.002, *[0.3] * 10):  # the first opens the connection
        near.answered(seconds)
    for seconds in (0.3, *[0.1] * 8):
        far.answered(seconds)
    assert (near.up.parallel.now, near.down.parallel.now) == (1, 4)
    assert (far.up.parallel.now, far.down.parallel.now) == (4, 32)


def test_bbr_fills_a_far_line_by_itself() -> None:
    line = Line()
    line.connections.congestion_control = "bbr"
    for seconds in (0.3, *[0.1] * 8):
        line.answered(seconds)
    assert line.is_far  # connections are opened ahead all the same
    assert (line.up.parallel.now, line.down.parallel.now) == (1, 4)


@pytest.mark.slow
def test_transfers_and_small_requests_have_connections_of_their_own(tmp_path: Path) -> None:
    """A transfer that begins where only small requests were begins with a small window."""
    ports: dict[str, set[int]] = {"up": set(), "down": set(), "other": set()}

    def noting(http: Any, run: str, token: str) -> Client:
        def note(response: httpx.Response) -> None:
            method, path = response.request.method, response.request.url.path
            port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            kind = "other" if "/fragments/" not in path else "up" if method == "PUT" else "down"
            ports[kind].add(port)

        for each in (http, http.up, http.down):
            each.event_hooks["response"].append(note)
        return Client(http, run, token)

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        Toy(coordinator, toy.spec(rounds=3), tmp_path).worker("a", client_class=noting)
    assert all(ports.values())
    assert not ports["up"] & ports["down"]
    assert not ports["other"] & (ports["up"] | ports["down"])


def test_connections_are_opened_ahead_if_those_of_the_last_transfers_have_been_closed() -> None:
    served: list[socket.socket] = []
    up, down = Line().up.parallel.now, Line().down.parallel.now
    together = threading.Barrier(up + down)

    class Health(Handler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/healthz":
                together.wait()  # as on a far line, none is answered before all are sent
            if self.connection not in served:
                served.append(self.connection)
            self.created()

    with serving(Health) as url, open_http(url) as http:
        client = Client(http, "r", "t")
        client.open_ahead()
        assert not served, "the line is short"
        client.line.is_far = True
        client.open_ahead()
        wait_until(lambda: len(served) == up + down)
        assert client.line.connections.count("up") == up
        client.open_ahead()
        http.get("/", extensions=client.line.connections.traced("other"))
        assert len(served) == up + down + 1, "those for transfers are open"
        for each in served:
            each.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: client.line.connections.count("up") + client.line.connections.count("down") == 0)
        client.open_ahead()
        wait_until(lambda: len(served) == 2 * (up + down) + 1)


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has no such options")
def test_silent_connections_are_probed_at_both_ends(tmp_path: Path) -> None:
    """A router that forgets them would cost the next transfer four seconds, and then its windows."""
    with coordinator_thread(tmp_path) as coordinator, open_http(coordinator.url) as http:
        answer = http.get("/healthz", extensions=Connections().traced("up"))
        ends = [answer.extensions["network_stream"].get_extra_info("socket")]
        ends += [each.transport.get_extra_info("socket") for each in coordinator.server.server_state.connections]
        assert len(ends) == 2
        for each in ends:
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60


class Dawdles(Client):
    """Gives the other fragments time to pass fragment 0 on its way to the line. `order`: how they got there."""

    def __init__(self, *arguments: Any, order: list[int], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._order, self._passed = order, threading.Event()

    def contribute(self, member_token, header, frames, *, on_line=lambda: None):
        if header.fragment > 0:
            self._passed.set()
        else:
            self._passed.wait(0.05)
            self._passed.clear()

        def note() -> None:
            self._order.append(header.fragment)
            on_line()

        super().contribute(member_token, header, frames, on_line=note)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["", "overlap = 2"])
def test_fragments_get_the_line_in_their_order(tmp_path: Path, sync: str) -> None:
    order: list[int] = []
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3, sync=sync), tmp_path)
        run.worker("a", client_class=lambda *arguments, **options: Dawdles(*arguments, order=order, **options))
    assert order == [0, 1, 2] * 3
