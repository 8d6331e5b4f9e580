"""Connections that carry nothing any more are given up, and what was on them goes over new ones."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest
from blake3 import blake3

from protocol import wire
from tests.support.http_server import Handler, serving
from tests.support.states import zeros_of_state_0
from tests.support.waiting import PATIENCE_S, wait_until
from worker.line import connections
from worker.link.client import Client, open_http
from worker.rounds.schedule import AHEAD_S, Lookahead

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


def test_an_upload_that_nobody_takes_any_more_is_sent_over_a_new_connection(silent: Callable[[], None]) -> None:
    """The first connection takes a part of the body and then nothing: as where a router has forgotten it."""
    header, frames = zeros_of_state_0(4 << 20)
    arrived: list[int] = []
    forgotten = threading.Event()

    class Forgets(Handler, BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
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


def test_a_download_that_stops_goes_on_where_it_was_over_a_new_connection(silent: Callable[[], None]) -> None:
    header, frames = zeros_of_state_0(1000)
    data = b"".join([wire.pack_header(header), *frames])
    forgotten, asked = threading.Event(), []

    class Stops(Handler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = self.headers.get("Range")
            asked.append(place)
            start = int(place.removeprefix("bytes=").split("-")[0]) if place else 0
            self.send_response(206 if place else 200)
            self.send_header("ETag", f'"{blake3(data).hexdigest()}"')
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            self.wfile.write(data[start:] if place else data[:500])
            if not place:
                silent()
                forgotten.wait()

    with serving(Stops) as url, open_http(url) as http:
        assert Client(http, "r", "t", sleep=lambda _: None).delta(0, 0, 1 << 20).total_bytes == len(data)
        forgotten.set()
    assert asked == [None, f"bytes=500-{len(data) - 1}"]


def test_a_coordinator_that_takes_its_time_to_answer_is_waited_for(silent: Callable[[], None]) -> None:
    """All that was sent has arrived: the line is well."""
    header, frames = zeros_of_state_0(1000)
    requests = []

    class Slow(Handler, BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            requests.append(self.rfile.read(int(self.headers["Content-Length"])))
            silent()
            threading.Event().wait(5 * SILENT_S)
            self.created()

    with serving(Slow) as url, open_http(url) as http:
        Client(http, "r", "t", sleep=lambda _: None).seed("m", header, frames)
    assert len(requests) == 1


def test_connections_are_opened_ahead_on_far_lines_alone() -> None:
    opened = []

    class Health(Handler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            opened.append(self.client_address)
            self.created()

    with serving(Health) as url, open_http(url) as http:
        client = Client(http, "r", "t")
        client.line.answered(0.001)
        client.open_ahead()
        assert opened == []
        far = Client(http, "r", "t")
        for _ in range(8):
            far.line.answered(0.1)
        far.open_ahead()
        wait_until(lambda: len(opened) == far.line.up.parallel.now + far.line.down.parallel.now)
    assert len(opened) == 36


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
