"""Coordinator and worker each install alone, in a fresh virtual environment, and start; and then they train together.

The coordinator where there is no C compiler, so without the compiled kernels: they compute the same bits.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.coordinator import CoordinatorProcess
from protocol.compiled import COMPILED
from protocol.messages import Scope
from tests.support.text import write_text
from tests.support.workers import WorkerProcess

ROOT = Path(__file__).parents[1]

SPEC = """
name = "alone"
[model]
preset = "tiny"
[data]
source = "{text}"
sequence_length = 16
[inner]
batch_size = 2
[sync]
rounds = 1
inner_steps = 2
"""


def installed_alone(directory: Path, extra: str, **environment: str) -> Path:
    """The Python of a new virtual environment that holds Outerstep with one extra, as a user would install it."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    source = directory / "source"  # a copy: building leaves traces beside what it builds
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "*.so", "__pycache__"))
    pins = str(ROOT / "constraints.txt")
    command = [*install, "-c", pins, f"{source}[{extra}]"]
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


@pytest.mark.system
@pytest.mark.timeout(900)  # it installs torch
def test_each_side_installs_alone_and_they_train_together(outside: Path) -> None:
    coordinator_python = installed_alone(outside / "coordinator-venv", "coordinator", CC="false")
    worker_python = installed_alone(outside / "worker-venv", "worker")
    assert not has(coordinator_python, "protocol.kernels")
    assert has(worker_python, "protocol.kernels") == COMPILED
    for python, absent in ((coordinator_python, ["torch", "transformers"]), (worker_python, ["fastapi", "sqlalchemy"])):
        assert has(python, "protocol")
        assert not any(has(python, module) for module in absent)

    no_torch = subprocess.run(
        [coordinator_python, "-m", "outerstep", "worker", "http://127.0.0.1:1", "--run", "x", "--token", "t"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert no_torch.returncode == 2
    assert "pip install" in no_torch.stderr

    coordinator = CoordinatorProcess(outside / "data", python=coordinator_python)
    running = coordinator.start()
    try:
        running.create_run(SPEC.format(text=write_text(outside / "text", seed=1)))
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
