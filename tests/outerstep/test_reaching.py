"""What is said where no coordinator is reached: by an operator's command and by a worker, in one sentence each."""

import http.server
import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness.coordinator import Certificate, make_certificate
from outerstep import DiLoCo, rest
from outerstep.common import connections
from outerstep.common.exit_codes import Exit
from outerstep.doctor.line import greet
from protocol.errors import NoCoordinator, Transient
from tests.outerstep.conftest import Served, outerstep, serving
from tests.outerstep.examples import SPEC
from tests.support.http_server import Handler, answering
from tests.support.http_server import serving as serving_pages
from worker.agent import run_worker
from worker.line.retry import describe
from worker.link.client import open_http
from worker.settings import WorkerSettings

FOR_PROGRAMMERS = re.compile(r"Errno|_ssl\.c|Error\b|Traceback|has no attribute")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificates") / "own")


@pytest.fixture(scope="module")
def secured(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A coordinator that serves HTTPS by a certificate that nobody has signed."""
    tls = ["--tls-certificate", str(certificate.file), "--tls-key", str(certificate.key)]
    with serving(tmp_path_factory.mktemp("secured") / "data", "0", *tls) as served:
        yield served


class Quiet(http.server.ThreadingHTTPServer):
    """It says nothing of handshakes that its clients break off, as these shall."""

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def greeting(certificate: Certificate) -> Iterator[str]:
    """Serve HTTPS with this certificate, whatever its faults; the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.key)
    server = Quiet(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield str(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Somebody else's server, which has a page for everything.
PAGE = b"<!DOCTYPE html>\n<html><head><title>Welcome to\n nginx!</title></head></html>"


def said_by_command(url: str, *options: str) -> tuple[int, str]:
    """Exit code and the one line of `outerstep run ls`."""
    code, _, err = outerstep("run", "ls", "--url", url, "--token", "t", *options)
    assert err.count("\n") == 1, err
    return code, err


@pytest.fixture
def said_by_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[[str], tuple[int, str]]:
    """Exit code and last line of a worker, which does not wait for a coordinator that is not there."""
    caplog.set_level(logging.INFO)

    def said(url: str) -> tuple[int, str]:
        caplog.clear()
        settings = WorkerSettings(url=url, run="r", token="t", name="a", state_dir=tmp_path / "state", device="cpu")
        code = run_worker(settings)
        return code, caplog.records[-1].getMessage()

    return said


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 404])
def test_a_server_that_is_no_coordinator(status: int, said_by_worker: Callable[[str], tuple[int, str]]) -> None:
    with serving_pages(answering(status, PAGE)) as url:
        for code, line in (said_by_command(url), said_by_worker(url)):
            assert code == Exit.REFUSED
            assert "a page called 'Welcome to nginx!'; check the URL and any proxy" in line
            assert not FOR_PROGRAMMERS.search(line)


@pytest.mark.slow
def test_the_wrong_scheme(served: Served, secured: Served, said_by_worker: Callable[[str], tuple[int, str]]) -> None:
    plain, tls = served.url, secured.url
    for said in (said_by_command, said_by_worker):
        code, line = said(plain.replace("http:", "https:"))
        assert (code, line.strip().endswith(f"does not speak HTTPS; give {plain}")) == (Exit.REFUSED, True), line
        code, line = said(tls.replace("https:", "http:"))
        assert (code, line.strip().endswith(f"speaks only HTTPS; give {tls}")) == (Exit.REFUSED, True), line


@pytest.mark.covers("security:bad-answers")
def test_a_certificate_that_nobody_has_signed(
    secured: Served, certificate: Certificate, said_by_worker: Callable[[str], tuple[int, str]]
) -> None:
    """A worker tried it again for ever."""
    for code, line in (said_by_command(secured.url), said_by_worker(secured.url)):
        assert code == Exit.REFUSED
        assert f"the certificate of {secured.url} is not trusted: self-signed certificate; give" in line
        assert "--ca FILE or OUTERSTEP_CA" in line
        assert not FOR_PROGRAMMERS.search(line)


@pytest.mark.slow
def test_a_certificate_that_is_given_is_trusted(
    secured: Served,
    certificate: Certificate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker also logs once what TCP does after a silence."""
    assert secured.outerstep("run", "ls", "--ca", str(certificate.file))[0] == 0
    monkeypatch.setenv("OUTERSTEP_CA", str(certificate.file))
    assert secured.outerstep("run", "create", "-", stdin=SPEC)[0] == 0
    assert secured.outerstep("run", "stop", "demo")[0] == 0
    token = secured.admin_token
    given: dict[str, Any] = {"url": secured.url, "run": "demo", "token": token, "device": "cpu"}
    given["state_dir"] = tmp_path / "state"
    with caplog.at_level(logging.INFO):
        assert run_worker(WorkerSettings(**given, ca=certificate.file)) == Exit.DONE
    assert len([each for each in caplog.messages if each.startswith("TCP's congestion control: ")]) == 1
    # A script has it from the environment, and gets as far as being refused by the coordinator.
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(Exception, match="not-found: there is no run other"):
        DiLoCo.connect(model, optimizer, run="other", url=secured.url, token=token)
    monkeypatch.delenv("OUTERSTEP_CA")
    with pytest.raises(NoCoordinator, match="is not trusted: self-signed certificate"):
        DiLoCo.connect(model, optimizer, run="other", url=secured.url, token=token)


@pytest.mark.slow
def test_a_file_without_certificates_is_told(
    secured: Served, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "missing")
    for file, told in ((str(certificate.key), "has no certificate in PEM"), (missing, "No such file or directory")):
        for command in (["run", "ls"], ["worker", secured.url, "--run", "r"]):
            code, _, err = secured.outerstep(*command, "--ca", file)
            assert (code, err.count("\n"), "--ca" in err, told in err) == (2, 1, True, True), err
    monkeypatch.setenv("OUTERSTEP_CA", missing)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="No such file or directory"):
        DiLoCo.connect(model, torch.optim.SGD(model.parameters()), run="r", url=secured.url, token="t")


@pytest.mark.slow
def test_a_certificate_of_another_host_or_time(tmp_path: Path) -> None:
    """The clock of this machine may be what is wrong, so the sentence has it."""
    other = make_certificate(tmp_path / "other", host="DNS:coordinator.example.org")
    past = make_certificate(tmp_path / "past", days=-1)
    for made, told in (
        (other, "IP address mismatch"),
        (past, r"certificate has expired; this machine's clock says \d{4}-\d\d-\d\d \d\d:\d\d UTC, set it"),
    ):
        with greeting(made) as port:
            code, line = said_by_command(f"https://127.0.0.1:{port}", "--ca", str(made.file))
        assert code == Exit.REFUSED
        assert re.search(told, line), line
        assert not FOR_PROGRAMMERS.search(line)


def test_nobody_there_is_worth_another_try() -> None:
    with socket.socket() as reserved:  # bound but not listening
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        code, line = said_by_command(f"http://127.0.0.1:{port}")
    told = f"outerstep: cannot reach the coordinator at http://127.0.0.1:{port}: connection refused\n"
    assert (code, line) == (Exit.RETRY, told)
    code, line = said_by_command("http://coordinator.invalid")
    assert (code, "its name is not known here" in line) == (Exit.RETRY, True), line
    assert not FOR_PROGRAMMERS.search(line)


# --- what the environment says ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ALL_PROXY", "ftp://127.0.0.1:9", "not by ftp"),
        ("HTTP_PROXY", "127.0.0.1:99999", "not the address of a proxy"),
        ("HTTPS_PROXY", "http://", "not the address of a proxy"),
        ("SSL_CERT_FILE", "/nonexistent/ca.pem", "No such file or directory"),
        ("SSL_CERT_FILE", __file__, "no certificate in PEM"),
        ("SSL_CERT_DIR", "/nonexistent", "no such directory"),
        ("all_proxy", "socks5://127.0.0.1:9", "pip install 'httpx[socks]'"),
    ],
)
def test_a_variable_with_which_no_client_can_be_made_is_named(
    variable: str,
    value: str,
    said: str,
    said_by_worker: Callable[[str], tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a traceback, or --ca was blamed."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv(variable, value)
    for code, line in (said_by_command("http://127.0.0.1:9"), said_by_worker("http://127.0.0.1:9")):
        assert code == Exit.USAGE
        assert f"{variable}={value}: " in line
        assert said in line
        assert not FOR_PROGRAMMERS.search(line)


@pytest.fixture
def without_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("without_no_proxy")
def test_a_dead_proxy_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator was said to refuse the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@127.0.0.1:{port}")
    url, said = "http://coordinator.example.org", f"through the proxy HTTP_PROXY=http://…@127.0.0.1:{port}: connection"
    code, line = said_by_command(url)
    assert (code, said in line) == (Exit.RETRY, True), line
    with open_http(url) as http, pytest.raises(httpx.ConnectError) as refused:
        http.get("/healthz")
    assert said in describe(refused.value)
    with open_http(url) as http, pytest.raises(Transient) as told:
        greet(rest.Client(http))
    assert said in str(told.value)
    assert str(told.value).endswith("; fix HTTP_PROXY, or connect without the proxy: NO_PROXY=coordinator.example.org")
    monkeypatch.setenv("NO_PROXY", "coordinator.example.org")
    assert "proxy" not in describe(refused.value)


@pytest.mark.slow
@pytest.mark.usefixtures("without_no_proxy")
def test_a_proxy_that_answers_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_pages(answering(404, PAGE)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        code, line = said_by_command("http://coordinator.example.org")
        assert (code, f"through the proxy HTTP_PROXY={proxy}, answered 404" in line) == (Exit.REFUSED, True), line
        secure = proxy.replace("http:", "https:")
        monkeypatch.setenv("HTTPS_PROXY", secure)
        code, line = said_by_command("https://coordinator.example.org")
        assert (code, f"the proxy HTTPS_PROXY={secure} does not speak HTTPS" in line) == (Exit.REFUSED, True), line


# --- TCP after a silence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "setting", "expected", "said"),
    [
        ("cubic", "1", True, "cubic; each sync begins with slow start, which this avoids: sysctl -w net.ipv4.tcp_slow"),
        ("cubic", "0", False, "cubic, which keeps its rate"),
        ("bbr", "1", False, "bbr, which keeps its rate"),
        ("cubic", None, None, "cubic"),
    ],
)
def test_what_tcp_does_after_a_silence_is_read_from_the_kernel(
    control: str, setting: str | None, expected: bool | None, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "tcp_slow_start_after_idle"
    if setting is not None:
        file.write_text(f"{setting}\n")
    monkeypatch.setattr(connections, "SLOW_START_AFTER_IDLE", file)
    assert connections.starts_slowly_after_silence(control) is expected
    assert connections.congestion_text(control).startswith(said)
