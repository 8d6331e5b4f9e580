"""Each side runs with its own extra alone: whatever else is installed here is hidden from it."""

import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from packaging.utils import canonicalize_name

from tests.support.distributions import BASE, EXTRAS, ROOT, closure
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

# Wrapping the finders rather than refusing imports: what is hidden is absent for importlib.util.find_spec as well.
RUN_WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from outerstep.cli import main
sys.argv = ["outerstep", *{arguments!r}]
main()
"""


def hidden_from(extra: str) -> list[str]:
    """Top-level modules that an installation of this extra alone would not have."""
    present = closure(BASE + EXTRAS[extra]) | {"outerstep"}
    return sorted(
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & present
    )


@contextmanager
def outerstep(extra: str, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """`outerstep ARGUMENTS` with this extra alone; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_WITHOUT.format(hidden=hidden_from(extra), arguments=list(arguments))],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_is_hidden() -> None:
    assert {"torch", "transformers", "safetensors", "pytest", "yaml"} <= set(hidden_from("coordinator"))
    assert {"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "pytest"} <= set(hidden_from("worker"))
    assert not {"numpy", "pydantic", "httpx"} & set(hidden_from("coordinator") + hidden_from("worker"))


@pytest.mark.system
def test_a_coordinator_starts_without_the_workers_libraries(tmp_path: Path) -> None:
    with outerstep("coordinator", "coordinator", "--data-dir", str(tmp_path / "data"), "--port", "0") as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("outerstep coordinator ready at http://127.0.0.1:"), process.communicate()[1]
        url = ready.split()[-1]
        with httpx.Client(base_url=url, trust_env=False) as client:
            assert client.get("/readyz").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)  # uvicorn shuts down, then lets the signal have its way


@pytest.mark.system
def test_a_worker_starts_without_the_coordinators_libraries(tmp_path: Path) -> None:
    """It gets as far as asking a coordinator, which is not there: port 9 is never listened on."""
    with outerstep(
        "worker", "worker", "http://127.0.0.1:9", "--run", "r", "--state-dir", str(tmp_path), OUTERSTEP_TOKEN="t"
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "cannot be reached" in line:
                break
        else:
            pytest.fail("".join(lines))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (0, 75)
