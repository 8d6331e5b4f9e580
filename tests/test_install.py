"""What is released is built, and what it says of itself is true; coordinator and worker each install alone from it, in a
fresh virtual environment, and start; and then they train together.

The worker from the wheel; the coordinator from the sdist, where there is no C compiler, so without the compiled kernels:
they compute the same bits.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename

from harness.coordinator import CoordinatorProcess
from protocol import __version__
from protocol.compiled import COMPILED
from protocol.messages import Scope
from tests.support.distributions import EXTRAS
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.workers import WorkerProcess

ROOT = Path(__file__).parents[1]

OLDEST_GLIBC = (2, 28)  # of 2018; who has an older one builds from the sdist


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel, as `make dist` builds them, from a copy: building leaves traces beside what it builds."""
    if not COMPILED:
        pytest.skip(
            "a wheel is released with the compiled kernels, which are not compiled here: apt install gcc python3-dev, "
            "then `make clean` and again"
        )
    source, folder = tmp_path_factory.mktemp("source") / "outerstep", tmp_path_factory.mktemp("dist")
    ignored = (
        "build",
        "dist",
        "*.egg-info",
        "*.so",
        "__pycache__",
        ".venv",
        ".git",
        ".*_cache",
        ".hypothesis",
        ".library",
    )
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored))
    subprocess.run([sys.executable, source / ".ci" / "dist.py", folder], check=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def installed_alone(directory: Path, distribution: Path, extra: str, **environment: str) -> Path:
    """The Python of a new virtual environment that holds Outerstep with one extra, as a user would install it."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pins = str(ROOT / "constraints.txt")
    command = [*install, "-c", pins, f"{distribution}[{extra}]"]
    subprocess.run(command, check=True, cwd=directory, env=os.environ | environment)
    return python


def has(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], cwd=python.parent, check=False).returncode == 0


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory from which the source tree cannot be imported by accident."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_of_the_packages() -> set[str]:
    """What a clone has in the packages, but for what is compiled."""
    packages = ("protocol", "coordinator", "worker", "outerstep", "migrations")
    found = (path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*") if path.is_file())
    return {str(path) for path in found if path.suffix not in (".so", ".pyc")}


def without_metadata(names: Iterable[str]) -> set[str]:
    return {name for name in names if not re.search(r"(\.dist-info|\.egg-info)/|/$", name)}


@pytest.mark.nightly
def test_the_wheel_is_for_every_python_and_old_linuxes_and_holds_all_that_is_in_the_packages(
    released: tuple[Path, Path],
) -> None:
    name, version, _, tags = parse_wheel_filename(released[1].name)
    assert (name, str(version)) == ("outerstep", __version__)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("cp311", "abi3")}
    if sys.platform == "linux":
        told = [re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag.platform) for tag in tags]
        glibc = {(int(each[1]), int(each[2])) for each in told if each}
        assert {each[3] for each in told if each} == {platform.machine()}
        assert glibc
        assert min(glibc) <= OLDEST_GLIBC
    with zipfile.ZipFile(released[1]) as wheel:
        held = without_metadata(wheel.namelist())
        metadata = Metadata.from_email(wheel.read(f"outerstep-{__version__}.dist-info/METADATA"), validate=True)
    assert held == files_of_the_packages() | {"protocol/kernels.abi3.so"}
    assert set(metadata.provides_extra or ()) == set(EXTRAS)
    assert metadata.description_content_type == "text/markdown"


@pytest.mark.nightly
def test_the_sdist_is_what_a_wheel_is_built_from_and_no_more(released: tuple[Path, Path]) -> None:
    with tarfile.open(released[0]) as sdist:
        names = without_metadata(member.name for member in sdist.getmembers() if member.isfile())
    held = {name.partition("/")[2] for name in names}
    building = {"pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in", "README.md", "LICENSE", "PKG-INFO"}
    assert held == files_of_the_packages() | building


@pytest.mark.nightly
@pytest.mark.timeout(900)  # it installs torch
def test_each_side_installs_alone_and_they_train_together(outside: Path, released: tuple[Path, Path]) -> None:
    sdist, wheel = released
    coordinator_python = installed_alone(outside / "coordinator-venv", sdist, "coordinator", CC="false")
    worker_python = installed_alone(outside / "worker-venv", wheel, "worker")
    assert not has(coordinator_python, "protocol.kernels")
    assert has(worker_python, "protocol.kernels")
    for python in (coordinator_python, worker_python):
        command = python.with_name("outerstep")
        shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
        assert shown.strip() == __version__
    for python, absent in ((coordinator_python, ["torch", "transformers"]), (worker_python, ["fastapi", "sqlalchemy"])):
        assert has(python, "protocol")
        assert not any(has(python, module) for module in absent)

    no_torch = subprocess.run(
        [coordinator_python, "-m", "outerstep", "worker", "http://127.0.0.1:1", "--run", "x"],
        env=os.environ | {"OUTERSTEP_TOKEN": "t"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert no_torch.returncode == 2
    assert "pip install" in no_torch.stderr

    coordinator = CoordinatorProcess(outside / "data", python=coordinator_python)
    running = coordinator.start()
    try:
        assert httpx.get(f"{running.url}/healthz").json()["version"] == __version__
        assert "<title>" in httpx.get(running.url, headers={"Accept": "text/html"}).text
        text = write_text(outside / "text", seed=1)
        running.create_run(tiny_spec("alone", text, seed=1, rounds=1, min_workers=1))
        token = running.token(Scope.WORKER)
        worker = WorkerProcess(running.url, "alone", "w0", token, outside / "w0", python=worker_python)
        worker.start()
        assert worker.wait() == 0, worker.log.read_text()
        info = httpx.get(f"{running.url}/v1/runs/alone", headers={"Authorization": f"Bearer {token}"}).json()
        assert info["state"] == "finished"
    finally:
        coordinator.stop()


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("outerstep")
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert "coordinator" in shown.stdout
