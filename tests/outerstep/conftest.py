"""A real coordinator, started by its own command, and the operators' commands run against it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from harness.member import Member
from harness.patience import PATIENCE_S
from harness.ports import free_port
from outerstep.cli import app
from outerstep.demo.processes import Child, Processes, wait_until_ready
from tests.outerstep.examples import SPEC


def outerstep(*arguments: object, stdin: str | None = None, **environment: str) -> tuple[int, str, str]:
    """Run a command in this process: exit code, stdout, stderr."""
    words = list(map(str, arguments))
    result = CliRunner().invoke(app, words, prog_name="outerstep", env=environment, input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


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

    @property
    def environment(self) -> dict[str, str]:
        return {"OUTERSTEP_URL": self.url, "OUTERSTEP_TOKEN": self.admin_token}

    def outerstep(self, *arguments: str, token: str | None = None, stdin: str | None = None) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        environment = self.environment | ({} if token is None else {"OUTERSTEP_TOKEN": token})
        return outerstep(*arguments, stdin=stdin, **environment)

    def shown(self, *arguments: str) -> Any:
        """What a command shows as JSON."""
        code, out, err = self.outerstep(*arguments, "--format", "json")
        assert code == 0, err
        return json.loads(out)

    def create(self, name: str) -> None:
        """Create the run of `examples.SPEC` under this name."""
        code, out, err = self.outerstep("run", "create", "-", stdin=SPEC.replace("demo", name))
        assert (code, err) == (0, ""), err
        assert out.startswith(f"run {name} is created: ")

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.admin_token}", **headers})

    def member(self, run: str, name: str = "w") -> Member:
        """One that has not joined."""
        return Member(self.client(), run, name)

    def seeded(self, run: str, name: str = "w") -> Member:
        """One that has joined as the first, and has seeded the run."""
        member = self.member(run, name)
        member.join(self.admin_token)
        assert member.assignment(None).action == "seed"
        member.seed()
        return member


@contextmanager
def serving(data: Path, port: str | None = None, *options: str, **environment: str) -> Iterator[Served]:
    port = port or str(free_port())
    logs = data.parent / f"{data.name}-logs"
    logs.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, Processes(logs) as processes:
        patch.setattr("outerstep.demo.processes.READY_WITHIN_S", PATIENCE_S)
        arguments = ["coordinator", "--data-dir", str(data), "--port", port, *options]
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
