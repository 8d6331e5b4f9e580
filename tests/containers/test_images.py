"""The images: what is in them, and a run with a coordinator and two workers in containers that may write to volumes alone."""

import json
from typing import Any

import httpx
import pytest

from harness.ports import free_port
from outerstep.common.exit_codes import Exit
from protocol.messages import Scope
from tests.containers.bases import SLIM
from tests.containers.conftest import COORDINATOR, WORKER, Images, Network
from tests.containers.engine import Engine
from tests.support.waiting import PATIENCE_S, answers, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]  # the first test makes base images and builds both

MB = 1_000_000
COORDINATOR_MB = 250  # above its base

# Whatever the Dockerfiles do not ask for is taken away.
BARE = ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--init"]

ROUNDS = 12
SPEC = f"""
name = "contained"
[model]
preset = "tiny"
[data]
sequence_length = 32
[inner]
batch_size = 4
learning_rate = 8e-3
warmup_steps = 10
[sync]
wait = "always"
rounds = {ROUNDS}
inner_steps = 20
[members]
min_workers = 2
[evaluation]
max_tokens = 2048
"""


def bare(engine: Engine) -> list[str]:
    # podman gives a read-only container places to write to in memory, docker does not
    return [*BARE, *(["--read-only-tmpfs=false"] if engine.name == "podman" else [])]


def test_the_coordinator_s_image_is_small(engine: Engine, images: Images, say) -> None:
    base, own, worker = (engine.bytes_of(image) for image in (SLIM, COORDINATOR, WORKER))
    say(f"coordinator: {(own - base) / MB:.0f} MB above a base of {base / MB:.0f} MB")
    say(f"worker with torch for CPUs: {(worker - base) / MB:.0f} MB above it")
    say(f"built in {', '.join(f'{seconds:.0f} s' for seconds in images.seconds.values())}")
    assert own - base <= COORDINATOR_MB * MB


def test_they_hold_what_they_should_and_say_what_they_are(engine: Engine, images: Images) -> None:
    from outerstep import __version__

    for image, absent, present in ((COORDINATOR, "torch", "fastapi"), (WORKER, "fastapi", "torch")):
        (shown,) = json.loads(engine("image", "inspect", image))
        assert shown["Config"]["Labels"]["org.opencontainers.image.version"] == __version__
        assert shown["Config"]["User"] == "outerstep"
        assert all(part not in text for text in shown["Config"]["Env"] for part in ("TOKEN", "PIP_"))
        program = f"""
import importlib.util, outerstep, protocol.kernels
assert importlib.util.find_spec("{absent}") is None
import {present}
print(outerstep.__version__)
"""
        assert engine("run", "--rm", image, "python", "-c", program) == __version__


def test_a_build_argument_chooses_torch_for_cpus(engine: Engine, images: Images) -> None:
    assert engine("run", "--rm", WORKER, "python", "-c", "import torch; print(torch.version.cuda)") == "None"
    assert "nvidia" not in engine("run", "--rm", WORKER, "pip", "list")


@pytest.mark.covers("security:container-takeover")
def test_a_run_in_containers_survives_its_coordinator(engine: Engine, images: Images, network: Network, say) -> None:
    coordinator, port = f"{network.name}-coordinator", free_port()
    data = [f"--volume={coordinator}:/data", f"--publish=127.0.0.1:{port}:8470"]
    network.start(coordinator, COORDINATOR, options=[*bare(engine), *data])
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S) as client:
        wait_until(lambda: answers(client, "/readyz"))
        assert engine("exec", coordinator, "id", "--user") == "10001"
        refused = engine.run("exec", coordinator, "touch", "/tmp/file")
        assert "Read-only file system" in refused.stderr
        admin = engine("exec", coordinator, "cat", "/data/admin.token")
        client.headers["Authorization"] = f"Bearer {admin}"
        client.post("/v1/runs", content=SPEC.encode()).raise_for_status()
        token = client.post("/v1/tokens", json={"scope": Scope.JOIN}).raise_for_status().json()["token"]

        workers = [f"{network.name}-worker-{index}" for index in range(2)]
        for worker in workers:
            command = ["outerstep", "worker", f"http://{coordinator}:8470", "--run", "contained", "--name", worker]
            command += ["--state-dir", "/state", "--device", "cpu"]
            options = [*bare(engine), "--tmpfs=/tmp", f"--volume={worker}:/state", "--env=OMP_NUM_THREADS=1"]
            options.append(f"--env=OUTERSTEP_TOKEN={token}")
            network.start(worker, WORKER, *command, options=options)

        wait_until(lambda: run(client)["round"] >= 2 or ended(engine, workers))
        assert not ended(engine, workers), engine.words_of(*workers)
        before = run(client)
        assert before["state"] == "running"
        engine("kill", "--signal=KILL", coordinator)
        assert engine("wait", coordinator) == "137"
        engine("start", coordinator)
        wait_until(lambda: answers(client, "/readyz"))
        assert run(client)["round"] >= before["round"]
        assert health(engine, coordinator) == "healthy"

        nowhere = ["outerstep", "worker", f"http://{coordinator}:8470", "--run", "no-such-run", "--state-dir", "/state"]
        told = [f"--network={network.name}", f"--env=OUTERSTEP_TOKEN={token}"]
        refused = engine.run("run", "--rm", *told, WORKER, *nowhere)
        assert refused.returncode == Exit.REFUSED, refused.stderr  # by which a supervisor knows not to try again

        codes = [engine("wait", worker) for worker in workers]
        assert codes == ["0", "0"], engine.words_of(*workers)
        assert run(client)["state"] == "finished"
        rounds = client.get("/v1/runs/contained/rounds", params={"limit": ROUNDS}).raise_for_status().json()["items"]
    losses = {each["round"]: each["held_out_loss"] for each in rounds}
    assert sorted(losses) == list(range(ROUNDS))
    say(f"held-out loss {losses[0]:.3f} → {losses[ROUNDS - 1]:.3f} nats per token, in {ROUNDS} rounds")
    assert losses[ROUNDS - 1] < losses[0]


def run(client: httpx.Client) -> dict[str, Any]:
    shown: dict[str, Any] = client.get("/v1/runs/contained").raise_for_status().json()
    return shown


def ended(engine: Engine, containers: list[str]) -> bool:
    return any(engine("inspect", "--format", "{{.State.Running}}", each) == "false" for each in containers)


def health(engine: Engine, container: str) -> str:
    """What the container's own health check finds."""
    if engine.name == "podman":  # which leaves it to systemd to do it again and again, and can be asked to do it now
        done = engine.run("healthcheck", "run", container)
        return "healthy" if done.returncode == 0 else done.stdout + done.stderr
    wait_until(lambda: engine("inspect", "--format", "{{.State.Health.Status}}", container) != "starting")
    return engine("inspect", "--format", "{{.State.Health.Status}}", container)
