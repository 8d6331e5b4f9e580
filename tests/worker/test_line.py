"""Upload bodies go over the line one after the other, and little of one is left when the next one begins."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_server import Handler, serving
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.link.client import Client, open_http
from worker.link.line import LEAST_MEASURED_BYTES, UNSENT_BYTES, Line


def test_the_next_body_follows_the_last_piece_without_waiting_for_the_answer() -> None:
    line = Line()
    with line.taken(iter([b"a", b"b"])) as first:
        assert list(first) == [b"a", b"b"]
        with line.taken(iter([b"c"])) as second:  # the first one's answer is still to come
            assert list(second) == [b"c"]


def test_nobody_else_sends_meanwhile() -> None:
    line, taken = Line(), threading.Event()
    sent: list[bytes] = []

    def send() -> None:
        with line.taken(iter([b"other"])) as body:
            taken.set()
            sent.extend(body)

    with line.taken(iter([b"a", b"b"])) as body:
        sent.append(next(body))
        other = threading.Thread(target=send)
        other.start()
        assert not taken.wait(0.05)
        sent.extend(body)
        other.join()
    assert sent == [b"a", b"b", b"other"]


def test_an_upload_that_breaks_frees_the_line() -> None:
    line = Line()

    def break_off() -> None:
        with line.taken(iter([b"a", b"b"])) as body:
            next(body)
            raise OSError("connection reset")

    with pytest.raises(OSError, match="reset"):
        break_off()
    with line.taken(iter([b"c"])) as body:
        assert list(body) == [b"c"]


def test_the_line_is_measured_by_what_is_too_much_for_buffers_on_the_way() -> None:
    now = 0.0

    def send(size: int) -> None:
        nonlocal now
        with line.taken(iter([bytes(size - 1), b"x"])) as body:
            for piece in body:
                now += len(piece) / 1e6
            now += 100  # until the answer

    line = Line(lambda: now)
    send(LEAST_MEASURED_BYTES - 1)
    assert line.rate.sums == (0, 0)
    send(3_000_000)
    assert line.rate.sums == pytest.approx((3_000_000, 3.0))


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
        with open_http(url) as http, pytest.raises(httpx.WriteTimeout):
            http.put("/", content=body(), headers={"Content-Length": str(256 << 15)}, timeout=0.5)
    assert 0 < handed < 1 << 20


def test_the_proxies_of_the_environment_are_used_and_handed_little_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Proxy(Handler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # the connection stays open, to be asked

        def do_PUT(self) -> None:
            asked.append(self.path)
            self.created()

    with serving(Proxy) as url:
        with open_http(url) as http:
            assert unsent_bytes(http.put("/direct")) == UNSENT_BYTES
        monkeypatch.setenv("http_proxy", url)
        with open_http("http://coordinator.invalid") as http:
            assert unsent_bytes(http.put("/through")) == UNSENT_BYTES
    assert asked == ["/direct", "http://coordinator.invalid/through"]


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


@pytest.mark.parametrize("sync", ["", "overlap = 2"])
def test_fragments_get_the_line_in_their_order(tmp_path: Path, sync: str) -> None:
    order: list[int] = []
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3, sync=sync), tmp_path)
        run.worker("a", client_class=lambda *arguments, **options: Dawdles(*arguments, order=order, **options))
    assert order == [0, 1, 2] * 3
