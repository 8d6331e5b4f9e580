"""A real coordinator, started by its own command, and the operators' commands run against it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.patience import PATIENCE_S
from harness.ports import free_port
from outerstep.cli import app
from outerstep.demo.processes import Child, Processes, wait_until_ready


@dataclass(frozen=True)
class Served:
    """A running coordinator; `outerstep` runs an operator's command on it, as its admin unless told otherwise."""

    url: str
    data: Path
    child: Child

    @property
    def admin_token(self) -> str:
        return (self.data / "admin.token").read_text().strip()

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def outerstep(self, *arguments: str, token: str | None = None, stdin: str | None = None) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        environment = {"OUTERSTEP_URL": self.url, "OUTERSTEP_TOKEN": token or self.admin_token}
        result = CliRunner().invoke(app, list(arguments), prog_name="outerstep", env=environment, input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr


@contextmanager
def serving(data: Path, port: str | None = None, *options: str, **environment: str) -> Iterator[Served]:
    port = port or str(free_port())
    logs = data.parent / f"{data.name}-logs"
    logs.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, Processes(logs) as processes:
        patch.setattr("outerstep.demo.processes.READY_WITHIN_S", PATIENCE_S)
        arguments = ["coordinator", "--data", str(data), "--port", port, *options]
        child = processes.start("coordinator", arguments, environment)
        yield Served(wait_until_ready(child), data, child)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One coordinator for all tests that leave it as usable as they found it."""
    with serving(tmp_path_factory.mktemp("served") / "data") as coordinator:
        yield coordinator


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTERSTEP_")]:
        monkeypatch.delenv(name)
