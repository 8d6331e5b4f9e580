"""Both images as they are built from this tree, once for all tests; what is missing for it skips them, in words."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.containers import engine as engines
from tests.containers.bases import FULL, SLIM, ensure
from tests.containers.engine import ROOT, Engine, Missing

COORDINATOR, WORKER = "localhost/outerstep-coordinator:latest", "localhost/outerstep-worker:cpu"
# Where torch for CPUs comes from: PyTorch's own index, unless the environment names another.
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


@dataclass(frozen=True)
class Images:
    """How long they took to build, in seconds, by name."""

    seconds: dict[str, float]


@pytest.fixture(scope="session")
def engine() -> Engine:
    try:
        return engines.engine()
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def images(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Images:
    folder = tmp_path_factory.mktemp("bases")
    try:
        for base in (SLIM, FULL):
            ensure(engine, base, folder)
        engines.check_that_containers_run(engine, SLIM)
    except Missing as missing:
        pytest.skip(str(missing))
    pip = engine.pip(folder)
    return Images(
        {
            COORDINATOR: engine.build(ROOT / "Dockerfile.coordinator", COORDINATOR, ROOT, *pip),
            WORKER: engine.build(
                ROOT / "Dockerfile.worker", WORKER, ROOT, *pip, f"--build-arg=TORCH_INDEX={TORCH_INDEX}"
            ),
        }
    )


@dataclass(frozen=True)
class Network:
    """A network of the engine's, in which containers find each other by their names."""

    engine: Engine
    name: str

    def start(self, name: str, image: str, *command: str, options: Sequence[str] = ()) -> str:
        """Start a container in it, and return its id."""
        return self.engine("run", "--detach", f"--network={self.name}", f"--name={name}", *options, image, *command)


@pytest.fixture
def network(engine: Engine, tmp_path: Path) -> Iterator[Network]:
    """... which is removed with all containers and volumes whose names begin with its name."""
    name = f"outerstep-test-{os.getpid()}"
    engine("network", "create", name)
    try:
        yield Network(engine, name)
    finally:
        ids = engine("ps", "--all", "--quiet", f"--filter=name={name}").split()
        if ids:
            engine("rm", "--force", "--volumes", *ids)
        volumes = engine("volume", "ls", "--quiet", f"--filter=name={name}").split()
        if volumes:
            engine("volume", "rm", *volumes)
        engine("network", "rm", name)
