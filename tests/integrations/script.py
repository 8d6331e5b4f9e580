"""A training script as a process of its own, a worker of one run, and what it tells at its end: JSON in its last line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

from harness.coordinator import InThread
from protocol.messages import Scope, WorkerInfo
from tests.support.forks import Forked


class Script(Protocol):
    """A process: its exit code once `communicate` has returned what it has written."""

    @property
    def returncode(self) -> int | None: ...
    def communicate(self) -> tuple[str, str]: ...


class _Forked:
    """One that has the frameworks imported already."""

    def __init__(self, source: str, argument: str, environment: dict[str, str], directory: Path) -> None:
        self._files = [Path(tempfile.mkdtemp(dir=directory)) / name for name in ("out", "errors")]
        out, errors = self._files
        self._process = Forked(source, [argument], environment, out, errors, directory)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def communicate(self) -> tuple[str, str]:
        self._process.wait()
        out, errors = (file.read_text() for file in self._files)
        return out, errors


def start(running: InThread, source: str, directory: Path, processes: int = 1, **how: Any) -> Script:
    """Start `source`, Python, in `directory`, by torchrun in several `processes`; its first argument is `how`, JSON."""
    environment = {
        "OUTERSTEP_URL": running.url,
        "OUTERSTEP_TOKEN": running.token(Scope.WORKER),
        "HOME": str(directory),
        "OMP_NUM_THREADS": "1",
    }
    if processes == 1:
        return _Forked(source, json.dumps(how), environment, directory)
    pipe = subprocess.PIPE
    (directory / "script.py").write_text(source)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, str(directory / "script.py"), json.dumps(how)]
    return subprocess.Popen(command, env=os.environ | environment, cwd=directory, stdout=pipe, stderr=pipe, text=True)


def result(process: Script) -> dict[str, Any]:
    """What it told, and its stderr as `errors`; it must have ended well."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told | {"errors": errors}


def told(running: InThread, run: str, name: str) -> WorkerInfo:
    """What the coordinator says of a worker."""
    with running.client() as http:
        return WorkerInfo.model_validate(http.get(f"/v1/runs/{run}/workers/{name}").json())
