"""docker-compose.yml, brought up with the profile of the demo: HTTPS through Caddy, Prometheus with its alerts, and two
workers whose loss falls."""

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from protocol.messages import Scope
from tests.containers.bases import CADDY, PROMETHEUS, ensure
from tests.containers.conftest import Images
from tests.containers.engine import ENVIRONMENT, ROOT, Engine, Missing
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Up:
    """A project that is up: its services, and the ports at which it is reached."""

    engine: Engine
    project: str
    https: int
    prometheus: int

    def container(self, service: str, number: int = 1) -> str:
        joint = "_" if self.engine.name == "podman" else "-"
        return joint.join((self.project, service, str(number)))


def compose(engine: Engine, project: str, *arguments: str, ports: dict[str, str]) -> str:
    own = Path(sys.executable).with_name("podman-compose")
    command = [str(own)] if engine.name == "podman" else ["docker", "compose"]
    done = subprocess.run(
        [*command, "-p", project, "-f", str(ROOT / "docker-compose.yml"), "--profile", "demo", *arguments],
        env=os.environ | ENVIRONMENT | ports,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def up(engine: Engine, images: Images, tmp_path: Path) -> Iterator[Up]:
    try:
        for image in (CADDY, PROMETHEUS):
            ensure(engine, image, tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))
    http, https, prometheus = free_port(), free_port(), free_port()
    ports = {
        "OUTERSTEP_HTTP_PORT": str(http),
        "OUTERSTEP_HTTPS_PORT": str(https),
        "OUTERSTEP_PROMETHEUS_PORT": str(prometheus),
    }
    project = f"outerstep-test-{os.getpid()}"
    try:
        # podman 4 starts nothing that depends on a container which has ended; so all start at once, and those that come
        # too early end and are started again, as each says of itself.
        early = ["--no-deps"] if engine.name == "podman" else []
        compose(engine, project, "up", "--detach", "--no-build", *early, ports=ports)
        yield Up(engine, project, https, prometheus)
    finally:
        ids = engine("ps", "--all", "--quiet", f"--filter=label=com.docker.compose.project={project}").split()
        if ids:
            engine("rm", "--force", "--volumes", *ids)  # podman-compose leaves volumes without names behind
        compose(engine, project, "down", "--volumes", "--timeout", "0", ports=ports)


def test_the_compose_file_comes_up_and_trains_the_demo(up: Up, tmp_path: Path, say) -> None:
    engine, coordinator = up.engine, up.container("coordinator")
    authority = tmp_path / "authority.pem"
    wait_until(lambda: engine.run("exec", up.container("caddy"), "test", "-s", ROOT_CERTIFICATE).returncode == 0)
    authority.write_text(engine("exec", up.container("caddy"), "cat", ROOT_CERTIFICATE))
    trusted = ssl.create_default_context(cafile=str(authority))
    with httpx.Client(base_url=f"https://localhost:{up.https}", verify=trusted, trust_env=False, timeout=60) as client:
        wait_until(lambda: is_ready(client))
        admin = engine("exec", coordinator, "cat", "/data/admin.token")
        client.headers["Authorization"] = f"Bearer {admin}"
        wait_until(lambda: client.get("/v1/runs/demo").is_success)

        workers = [up.container("demo-worker", number) for number in (1, 2)]
        wait_until(lambda: finished_rounds(client) >= 3, patience_s=600)
        rounds = client.get("/v1/runs/demo/rounds", params={"limit": 100}).raise_for_status().json()["items"]
        losses = [each["held_out_loss"] for each in sorted(rounds, key=lambda each: each["round"])][:3]
        say(f"held-out loss of the demo's first rounds: {', '.join(f'{loss:.3f}' for loss in losses)} nats per token")
        assert losses[2] < losses[0]
        assert all(" loss " in engine.words_of(worker) for worker in workers)

        tokens = client.get("/v1/tokens").raise_for_status().json()["items"]
        scopes = [each["scope"] for each in tokens if each["note"] == "docker-compose.yml"]
        assert sorted(set(scopes)) == [Scope.JOIN, Scope.VIEWER, Scope.WORKER], "a worker has its own, for that to join"
        assert scopes.count(Scope.JOIN) == scopes.count(Scope.VIEWER) == 1, "however often that service was started"

    with httpx.Client(base_url=f"http://127.0.0.1:{up.prometheus}", trust_env=False, timeout=60) as prometheus:
        wait_until(lambda: answer(prometheus, 'outerstep_run_state{run="demo"} == 1') != [])
        assert answer(prometheus, 'up{job="outerstep"}') == ["1"]
        groups = prometheus.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        assert "OuterstepCoordinatorDown" in {rule["name"] for group in groups for rule in group["rules"]}


ROOT_CERTIFICATE = "/data/caddy/pki/authorities/local/root.crt"


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


def finished_rounds(client: httpx.Client) -> int:
    return int(client.get("/v1/runs/demo").raise_for_status().json()["round"])


def answer(prometheus: httpx.Client, question: str) -> list[str]:
    """The values that Prometheus has for an expression; none while it does not serve yet."""
    try:
        reply = prometheus.get("/api/v1/query", params={"query": question})
    except httpx.TransportError:
        return []
    return [each["value"][1] for each in reply.json()["data"]["result"]] if reply.is_success else []
