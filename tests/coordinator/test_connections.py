"""Connections as nobody of good will makes them, against a real server: what is refused, and that others are served."""

import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse, RemoteDisconnected
from pathlib import Path

import httpx
import pytest

from coordinator.http.connections import MAX_PIPELINED
from harness.coordinator import InThread, coordinator_thread, make_certificate
from outerstep.common.connections import ssl_context
from tests.support.waiting import PATIENCE_S, wait_until

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl for certificates")
HALF = b"GET /healthz HTTP/1.1\r\nHost"
GET = b"GET /healthz HTTP/1.1\r\nHost: c\r\n"
CHUNKED = GET + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def line(running: InThread, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A connection from one of the addresses of this machine."""
    with socket.create_connection(
        ("127.0.0.1", running.port), timeout=PATIENCE_S, source_address=(address, 0)
    ) as connection:
        yield connection


def status(connection: socket.socket) -> int:
    """The status of the next answer, which is read."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def is_open(running: InThread, connection: socket.socket) -> bool:
    """True if the server has this connection."""
    own = connection.getsockname()
    return any(
        each.transport.get_extra_info("peername") == own for each in list(running.server.server_state.connections)
    )


def send_all(connection: socket.socket, piece: bytes, times: int) -> int:
    """Send until the other side takes no more; return how many bytes it took."""
    sent = 0
    try:
        for _ in range(times):
            connection.sendall(piece)
            sent += len(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


def is_served(running: InThread) -> bool:
    with line(running) as connection:
        connection.sendall(GET + b"\r\n")
        return status(connection) == 200


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X-Long: " + b"a" * 40_000 + b"\r\n\r\n",
        GET + b"".join(b"X-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: c\r\n\r\n",
        GET + b"X-Endless: " + b"a" * 400_000,
    ],
    ids=["a long one", "many", "a long address", "one that does not end"],
)
def test_a_head_that_is_too_large_is_refused(shared: InThread, head: bytes) -> None:
    with line(shared) as connection:
        connection.sendall(head)
        assert status(connection) == 431
    assert is_served(shared)


@pytest.mark.covers("security:huge-headers")
@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (GET, b"".join(b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(1000))),
        (CHUNKED + b"0\r\nX-Trailer: ", b"a" * 65_536),
        (CHUNKED + b"1;", b"a" * 65_536),
        (b"", (GET + b"\r\n") * 1000),
    ],
    ids=["headers", "a trailer", "the extension of a chunk", "requests far ahead of their answers"],
)
def test_what_does_not_end_is_not_read(shared: InThread, begun: bytes, piece: bytes) -> None:
    """40 MB of headers made the coordinator 1.2 GB larger, without a token."""
    with line(shared) as connection:
        connection.sendall(begun)
        sent = send_all(connection, piece, 1 + 50_000_000 // len(piece))
        assert sent < 20_000_000  # what the buffers of the system hold
    assert is_served(shared)


@pytest.mark.parametrize("begun", [b"", HALF, b"\r\n"], ids=["nothing", "half a head", "an empty line"])
def test_a_head_that_does_not_come_in_time_ends_its_connection(
    shared: InThread, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    told = None
    for head_s in (0.1, 1, 10):  # counted from the connection: on a busy machine even the half may be too late
        monkeypatch.setattr(shared.coordinator.settings, "head_s", head_s)
        with line(shared) as connection, suppress(RemoteDisconnected, ConnectionError):
            connection.sendall(begun)
            if begun != HALF:
                assert is_cut(connection)
                return
            told = status(connection)
            break
    assert told == 408


@pytest.mark.parametrize("request_", [b"\x16\x03\x01 hello\r\n\r\n", CHUNKED + b"zz\r\n"])
def test_what_is_no_http_is_refused(shared: InThread, request_: bytes) -> None:
    with line(shared) as connection:
        connection.sendall(request_)
        answer = HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers["Content-Type"]) == (400, "application/problem+json")
        assert b"this is not HTTP/1.1: " in answer.read()
        assert answer.headers["Connection"] == "close"


def test_requests_may_be_sent_somewhat_ahead(shared: InThread) -> None:
    """Each is remembered until those before it are answered."""
    with line(shared) as connection:
        connection.sendall((GET + b"\r\n") * (MAX_PIPELINED // 2))
        answered = b""
        while answered.count(b"HTTP/1.1 200 ") < MAX_PIPELINED // 2:
            answered += connection.recv(1 << 16)


# --- bodies that nobody wants -----------------------------------------------------------------------------------------


def test_the_rest_of_a_refused_body_is_waited_for_only_as_long_as_it_comes(
    shared: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = b"PUT /v1/runs/r/workers/w HTTP/1.1\r\nHost: c\r\nContent-Length: 1000\r\n\r\n"
    with line(shared) as connection:
        connection.sendall(refused + b"x" * 999)
        assert status(connection) == 401
        connection.sendall(b"x" + GET + b"\r\n")
        assert status(connection) == 200
    monkeypatch.setattr(shared.coordinator.settings, "upload_idle_s", 0.1)
    with line(shared) as connection:
        connection.sendall(refused + b"x" * 999)
        assert status(connection) == 401
        assert is_cut(connection)


def test_an_answer_that_is_not_read_is_given_up(shared: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.coordinator.settings, "upload_idle_s", 0.2)
    with line(shared) as connection:
        wait_until(lambda: is_open(shared, connection))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = b"GET /v1/line-check?bytes=8388608 HTTP/1.1\r\nHost: c\r\nAuthorization: Bearer %s\r\n\r\n"
        connection.sendall(asked % shared.admin_token.encode() * 2)
        wait_until(lambda: not is_open(shared, connection))


# --- how many ---------------------------------------------------------------------------------------------------------


def test_of_one_address_so_many_and_another_is_served(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        coordinator_thread(data, max_connections=20, max_connections_per_address=5) as running,
        ExitStack() as held,
    ):
        begun = b"POST /v1/runs HTTP/1.1\r\nHost: c\r\nContent-Length: 9\r\nExpect: 100-continue\r\n"
        begun += f"Authorization: Bearer {running.admin_token}\r\n\r\n".encode()
        idle = held.enter_context(line(running, "127.0.0.2"))
        for _ in range(5):
            busy = held.enter_context(line(running, "127.0.0.2"))
            busy.sendall(begun)
            assert b" 100 " in busy.recv(1000)
        assert is_cut(idle), "it has made room for the last one"
        with line(running, "127.0.0.2") as one_more:
            assert status(one_more) == 503
        assert is_served(running)


@needs_openssl
def test_before_a_handshake_they_are_counted_too(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path / "tls")
    with ExitStack() as held:
        served = coordinator_thread(
            tmp_path / "data", max_connections=20, tls_certificate=certificate.file, tls_key=certificate.key
        )
        running = held.enter_context(served)
        for number in range(50):
            held.enter_context(line(running, f"127.0.0.{2 + number}"))
        with httpx.Client(base_url=running.url, verify=ssl_context(certificate.file)) as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/healthz", headers={"X-Long": "a" * 40_000}).status_code == 431
        assert len(running.server.connections) <= 20
        first = held.enter_context(line(running, "127.0.0.99"))
        for _ in range(running.server.connections.per_address):
            held.enter_context(line(running, "127.0.0.99"))
        assert is_cut(first)


@pytest.mark.covers("security:idle-connections")
@needs_openssl
def test_a_handshake_that_does_not_come_in_time_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path / "tls")
    data = tmp_path / "data"
    with coordinator_thread(data, tls_certificate=certificate.file, tls_key=certificate.key) as running:
        monkeypatch.setattr(running.coordinator.settings, "head_s", 0.1)
        for begun in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            with line(running) as connection:
                connection.sendall(begun)
                while not is_cut(connection):  # it may be told what is wrong first
                    pass


@pytest.mark.covers("security:idle-connections")
def test_idle_connections_shut_nobody_out(tmp_path: Path) -> None:
    """1,100 of them, where 1,024 files could be open, ended a run."""
    with coordinator_thread(tmp_path / "data", max_connections=20, proxies="127.0.0.0/8") as running:
        with ExitStack() as held:
            for number in range(100):
                held.enter_context(line(running, f"127.0.0.{2 + number % 50}"))
            assert is_served(running)
            assert len(running.server.connections) <= 20
        assert is_served(running)
