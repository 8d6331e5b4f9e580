"""docker-compose.yml, brought up with the profile of the demo: HTTPS through Caddy, Prometheus with its alerts, and two
workers whose loss falls. Then the same with PostgreSQL, a store, two coordinators and two aggregators."""

import base64
import os
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from harness.ports import free_port
from protocol.messages import Scope
from tests.containers.bases import CADDY, POSTGRESQL, PROMETHEUS, SEAWEEDFS, ensure
from tests.containers.conftest import Images
from tests.containers.engine import ENVIRONMENT, ROOT, Engine, Missing
from tests.support.waiting import PATIENCE_S, answers, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Project:
    """What is up: its services, and the ports at which it is reached. `settings`: what .env would have."""

    engine: Engine
    name: str
    profiles: tuple[str, ...]
    settings: dict[str, str]
    https: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)
    prometheus: int = field(default_factory=free_port)

    def container(self, service: str, number: int = 1) -> str:
        joint = "_" if self.engine.name == "podman" else "-"
        return joint.join((self.name, service, str(number)))

    def compose(self, *arguments: str) -> str:
        own = Path(sys.executable).with_name("podman-compose")
        command = [str(own)] if self.engine.name == "podman" else ["docker", "compose"]
        command += ["-p", self.name, "-f", str(ROOT / "docker-compose.yml")]
        command += [f"--profile={each}" for each in self.profiles]
        ports = {
            "OUTERSTEP_HTTP_PORT": str(self.http),
            "OUTERSTEP_HTTPS_PORT": str(self.https),
            "OUTERSTEP_PROMETHEUS_PORT": str(self.prometheus),
        }
        environment = os.environ | ENVIRONMENT | self.settings | ports
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def up(self) -> Iterator[None]:
        try:
            # podman 4 starts nothing that depends on a container which has ended; so all start at once, and those that
            # come too early end and are started again, as each says of itself.
            early = ["--no-deps"] if self.engine.name == "podman" else []
            self.compose("up", "--detach", "--no-build", *early)
            yield
        finally:
            ids = self.engine(
                "ps", "--all", "--quiet", f"--filter=label=com.docker.compose.project={self.name}"
            ).split()
            if ids:
                self.engine("rm", "--force", "--volumes", *ids)  # podman-compose leaves volumes without names behind
            self.compose("down", "--volumes", "--timeout", "0")

    @contextmanager
    def client(self, folder: Path) -> Iterator[httpx.Client]:
        """A client through Caddy that trusts Caddy's own authority, once a coordinator is ready."""
        caddy, authority = self.container("caddy"), folder / "authority.pem"
        wait_until(lambda: self.engine.run("exec", caddy, "test", "-s", ROOT_CERTIFICATE).returncode == 0)
        authority.write_text(self.engine("exec", caddy, "cat", ROOT_CERTIFICATE))
        trusted = ssl.create_default_context(cafile=str(authority))
        url = f"https://localhost:{self.https}"
        with httpx.Client(base_url=url, verify=trusted, trust_env=False, timeout=PATIENCE_S) as client:
            wait_until(lambda: answers(client, "/readyz"))
            yield client

    def ask_prometheus(self, question: str) -> list[str]:
        """The values that Prometheus has for an expression; none while it does not serve yet."""
        try:
            url = f"http://127.0.0.1:{self.prometheus}/api/v1/query"
            reply = httpx.get(url, params={"query": question}, trust_env=False, timeout=PATIENCE_S)
        except httpx.TransportError:
            return []
        return [each["value"][1] for each in reply.json()["data"]["result"]] if reply.is_success else []


def have(engine: Engine, folder: Path, *images: str) -> None:
    try:
        for image in images:
            ensure(engine, image, folder)
    except Missing as missing:
        pytest.skip(str(missing))


def test_the_compose_file_comes_up_and_trains_the_demo(engine: Engine, images: Images, tmp_path: Path, say) -> None:
    have(engine, tmp_path, CADDY, PROMETHEUS)
    project = Project(engine, f"outerstep-test-{os.getpid()}", ("demo",), {})
    with project.up(), project.client(tmp_path) as client:
        admin = engine("exec", project.container("coordinator"), "cat", "/data/admin.token")
        client.headers["Authorization"] = f"Bearer {admin}"
        wait_until(lambda: client.get("/v1/runs/demo").is_success)

        workers = [project.container("demo-worker", number) for number in (1, 2)]
        wait_until(lambda: finished_rounds(client) >= 3, patience_s=600)
        losses = losses_of(client)[:3]
        say(f"held-out loss of the demo's first rounds: {', '.join(f'{loss:.3f}' for loss in losses)} nats per token")
        assert losses[2] < losses[0]
        assert all(" loss " in engine.words_of(worker) for worker in workers)

        tokens = client.get("/v1/tokens").raise_for_status().json()["items"]
        scopes = [each["scope"] for each in tokens if each["note"] == "docker-compose.yml"]
        assert sorted(set(scopes)) == [Scope.JOIN, Scope.VIEWER, Scope.WORKER], "a worker has its own, for that to join"
        assert scopes.count(Scope.JOIN) == scopes.count(Scope.VIEWER) == 1, "however often that service was started"

        wait_until(lambda: project.ask_prometheus('outerstep_run_state{run="demo"} == 1') != [])
        assert project.ask_prometheus('up{job="outerstep"}') == ["1"]
        url = f"http://127.0.0.1:{project.prometheus}/api/v1/rules"
        groups = httpx.get(url, trust_env=False).raise_for_status().json()["data"]["groups"]
        assert "OuterstepCoordinatorDown" in {rule["name"] for group in groups for rule in group["rules"]}


def test_the_other_coordinator_leads_when_the_container_of_one_is_killed(
    engine: Engine, images: Images, tmp_path: Path, say
) -> None:
    have(engine, tmp_path, CADDY, PROMETHEUS, POSTGRESQL, SEAWEEDFS)
    admin = "ost_" + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    settings = {  # as docs/scaling.md has them, but for the store, which nobody outside needs to reach
        "OUTERSTEP_UPSTREAM": "coordinator:8470 coordinator-2:8470",
        "OUTERSTEP_HEALTH": "/readyz",
        "OUTERSTEP_PROMETHEUS": "prometheus-scale.yml",
        "OUTERSTEP_COORDINATOR_ADMIN_TOKEN": admin,
        "OUTERSTEP_COORDINATOR_DATABASE": "postgresql+psycopg://outerstep@database/outerstep",
        "OUTERSTEP_DATABASE_PASSWORD": secrets.token_hex(24),
        "OUTERSTEP_COORDINATOR_BLOBS": "s3+http://store:8333/outerstep-bucket/blobs",
        "AWS_ACCESS_KEY_ID": secrets.token_hex(12),
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(24),
    }
    project = Project(engine, f"outerstep-test-{os.getpid()}-scale", ("scale", "demo"), settings)
    with project.up(), project.client(tmp_path) as client:
        client.headers["Authorization"] = f"Bearer {admin}"
        wait_until(lambda: client.get("/v1/runs/demo").is_success)
        wait_until(lambda: finished_rounds(client) >= 2, patience_s=600)
        status = client.get("/v1/status").raise_for_status().json()
        assert len(status["coordinators"]) == len(status["aggregators"]) == 2
        wait_until(lambda: project.ask_prometheus('up{job="outerstep"}') == ["1", "1"])
        wait_until(lambda: sorted(project.ask_prometheus("outerstep_leads")) == ["0", "1"])

        before = leader(client)
        killed = project.container(next(each for each in ("coordinator", "coordinator-2") if leads(project, each)))
        engine("kill", "--signal=KILL", killed)
        started = time.monotonic()
        wait_until(lambda: leader(client) not in {None, before})
        say(f"another coordinator leads {time.monotonic() - started:.1f} s after the leader's container was killed")
        engine.run("start", killed)  # unless the engine has done it already
        round_ = finished_rounds(client)
        wait_until(lambda: finished_rounds(client) >= round_ + 2, patience_s=600)
        losses = losses_of(client)
        say(f"held-out loss of the rounds: {', '.join(f'{loss:.3f}' for loss in losses)} nats per token")
        assert losses[-1] < losses[0]


def leader(client: httpx.Client) -> str | None:
    """The id of the coordinator that leads; None if none answers."""
    try:
        reply = client.get("/v1/status")
    except httpx.TransportError:
        return None
    return (
        next((each["id"] for each in reply.json()["coordinators"] if each["leads"]), None) if reply.is_success else None
    )


def leads(project: Project, service: str) -> bool:
    """Whether the coordinator in this container says so itself."""
    ask = "import json, urllib.request as it; print(json.load(it.urlopen('http://127.0.0.1:8470/readyz'))['status'])"
    return project.engine("exec", project.container(service), "python", "-c", ask) == "ready"


ROOT_CERTIFICATE = "/data/caddy/pki/authorities/local/root.crt"


def finished_rounds(client: httpx.Client) -> int:
    return int(client.get("/v1/runs/demo").raise_for_status().json()["round"])


def losses_of(client: httpx.Client) -> list[float]:
    """The held-out loss after each round that has one, in nats per token."""
    rounds = client.get("/v1/runs/demo/rounds", params={"limit": 100}).raise_for_status().json()["items"]
    in_order = sorted(rounds, key=lambda each: each["round"])
    return [each["held_out_loss"] for each in in_order if each["held_out_loss"] is not None]
