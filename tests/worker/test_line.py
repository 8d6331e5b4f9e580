"""The line: what its connections are told, how much is on its way over them, in which order fragments get it, and what
becomes of connections that carry nothing any more."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest
from blake3 import blake3

from protocol import wire
from tests.support.http_server import Handler, serving
from tests.support.states import zeros_of_state_0
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import MakeToy, coordinator_thread
from worker.line import connections
from worker.line.connections import UNSENT_BYTES, Connections
from worker.line.line import Line
from worker.link.client import Client, open_http
from worker.rounds.schedule import AHEAD_S, Lookahead


def unsent_bytes(response: httpx.Response) -> int:
    """How much the connection of this answer takes without sending it."""
    connection = response.extensions["network_stream"].get_extra_info("socket")
    return int(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))


@pytest.mark.slow
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


def test_much_of_an_answer_is_read_at_once() -> None:
    asked: list[int] = []

    class Stream(httpcore.MockStream):
        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            asked.append(max_bytes)
            return super().read(max_bytes, timeout)

    class Backend(httpcore.NetworkBackend):
        def connect_tcp(self, *_: Any, **__: Any) -> httpcore.NetworkStream:
            return Stream([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ok"])

    with httpcore.ConnectionPool(network_backend=Backend()) as pool:
        assert pool.request("GET", "http://coordinator/").content == b"ok"
    assert set(asked) == {1 << 18}


@pytest.mark.slow
def test_the_proxies_of_the_environment_are_used_and_handed_little_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Proxy(Handler):
        protocol_version = "HTTP/1.1"  # the connection stays open, to be asked

        def do_PUT(self) -> None:  # noqa: N802
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


@pytest.mark.parametrize(
    ("congestion_control", "seconds", "connections"),  # the first answer opens the connection
    [
        (None, [0.3, 0.002, *[0.3] * 10], (False, 1, 4)),
        (None, [0.3, *[0.1] * 8], (True, 4, 32)),
        # It fills a far line by itself. Connections are opened ahead all the same.
        ("bbr", [0.3, *[0.1] * 8], (True, 1, 4)),
    ],
)
def test_a_far_line_is_begun_with_more_connections(
    congestion_control: str | None, seconds: list[float], connections: tuple[bool, int, int]
) -> None:
    line = Line()
    line.connections.congestion_control = congestion_control
    for each in seconds:
        line.answered(each)
    assert (line.is_far, line.up.parallel.now, line.down.parallel.now) == connections


@pytest.mark.slow
def test_transfers_and_small_requests_have_connections_of_their_own(toy_run: MakeToy) -> None:
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

    toy_run(toy.spec(rounds=3)).worker("a", client_class=noting)
    assert all(ports.values())
    assert not ports["up"] & ports["down"]
    assert not ports["other"] & (ports["up"] | ports["down"])


@pytest.mark.slow
def test_connections_are_opened_ahead_if_those_of_the_last_transfers_have_been_closed() -> None:
    served: list[socket.socket] = []
    up, down = Line().up.parallel.now, Line().down.parallel.now
    together = threading.Barrier(up + down)

    class Health(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
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


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["", "overlap = 2"])
def test_fragments_get_the_line_in_their_order(toy_run: MakeToy, sync: str) -> None:
    order, passed = list[int](), threading.Event()

    class Dawdles(Client):
        """Gives the other fragments time to pass fragment 0 on its way to the line."""

        def contribute(self, member_token, header, frames, *, on_line=lambda: None):
            if header.fragment > 0:
                passed.set()
            else:
                passed.wait(0.05)
                passed.clear()

            def note() -> None:
                order.append(header.fragment)
                on_line()

            super().contribute(member_token, header, frames, on_line=note)

    toy_run(toy.spec(rounds=3, sync=sync)).worker("a", client_class=Dawdles)
    assert order == [0, 1, 2] * 3


# --- connections that carry nothing any more -----------------------------------------------------------------------


SILENT_S = 0.2


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it once a connection is silent. Until then, and after the connection is given up, none counts as silent,
    however slow the machine is."""

    def patience(seconds: float) -> None:
        monkeypatch.setattr(connections, "SILENT_S", seconds)

    def give_up(these: connections.Connections) -> None:
        patience(PATIENCE_S)
        abort(these)

    abort = connections.Connections.abort
    patience(PATIENCE_S)
    monkeypatch.setattr(connections, "LOOKS_S", SILENT_S / 4)
    monkeypatch.setattr(connections.Connections, "abort", give_up)
    return lambda: patience(SILENT_S)


@pytest.mark.slow
def test_an_upload_that_nobody_takes_any_more_is_sent_over_a_new_connection(silent: Callable[[], None]) -> None:
    """The first connection takes a part of the body and then nothing: as where a router has forgotten it."""
    header, frames = zeros_of_state_0(4 << 20)
    arrived: list[int] = []
    forgotten = threading.Event()

    class Forgets(Handler):
        def do_PUT(self) -> None:  # noqa: N802
            length = int(self.headers["Content-Length"])
            if not arrived:
                arrived.append(0)
                self.rfile.read(100_000)
                silent()
                forgotten.wait()  # the connection stays open, and nobody reads
                return
            arrived.append(len(self.rfile.read(length)))
            self.created()

    with serving(Forgets) as url, open_http(url) as http:
        Client(http, "r", "t", sleep=lambda _: None).seed("m", header, frames)
        forgotten.set()
    assert arrived == [0, sum(map(len, frames)) + len(wire.pack_header(header))]


@pytest.mark.slow
def test_a_download_that_stops_goes_on_where_it_was_over_a_new_connection(silent: Callable[[], None]) -> None:
    header, frames = zeros_of_state_0(1000)
    data = b"".join([wire.pack_header(header), *frames])
    forgotten, asked = threading.Event(), []

    class Stops(Handler):
        def do_GET(self) -> None:  # noqa: N802
            place = self.headers.get("Range")
            asked.append(place)
            start = int(place.removeprefix("bytes=").split("-")[0]) if place else 0
            headers = {"ETag": f'"{blake3(data).hexdigest()}"', "Content-Length": str(len(data) - start)}
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.answer(206 if place else 200, data[start:] if place else data[:500], headers)
            if not place:
                silent()
                forgotten.wait()

    with serving(Stops) as url, open_http(url) as http:
        assert Client(http, "r", "t", sleep=lambda _: None).delta(0, 0, 1 << 20).total_bytes == len(data)
        forgotten.set()
    assert asked == [None, f"bytes=500-{len(data) - 1}"]


@pytest.mark.slow
def test_a_coordinator_that_takes_its_time_to_answer_is_waited_for(silent: Callable[[], None]) -> None:
    """All that was sent has arrived: the line is well."""
    header, frames = zeros_of_state_0(1000)
    requests = []

    class Slow(Handler):
        def do_PUT(self) -> None:  # noqa: N802
            requests.append(self.rfile.read(int(self.headers["Content-Length"])))
            silent()
            threading.Event().wait(5 * SILENT_S)
            self.created()

    with serving(Slow) as url, open_http(url) as http:
        Client(http, "r", "t", sleep=lambda _: None).seed("m", header, frames)
    assert len(requests) == 1


def test_the_sync_is_near_once_for_all_that_is_sent_after_an_inner_step() -> None:
    now = 0.0
    approach = Lookahead(lambda: now)
    near = []
    for round_number in range(2):
        for done in range(1, 101):
            now += 0.125
            if approach.is_near(round_number, 100, 100 - done):
                near.append((round_number, done))
    assert near == [(0, 100 - AHEAD_S / 0.125), (1, 100 - AHEAD_S / 0.125)]


def test_of_long_steps_the_last_one_is_near() -> None:
    now = 0.0
    approach = Lookahead(lambda: now)
    near = []
    for done in range(1, 6):
        now += 2 * AHEAD_S
        near.append(approach.is_near(0, 5, 5 - done))
    assert near == [False, False, False, True, False]
