"""A training script as a process of its own, a worker of the run "trained", and what it tells at its end: JSON in its last line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

from harness.coordinator import InThread
from protocol.messages import WorkerInfo
from tests.support.forks import Forked
from tests.support.workers import script_environment

H, ROUNDS = 3, 3
TOTAL = H * ROUNDS
SPEC = f"""
name = "trained"
[data]
source = "custom"
sequence_length = 8
[inner]
batch_size = 4
[sync]
wait = "always"
rounds = {ROUNDS}
inner_steps = {H}
upload_codec = "int8"
fragment_elements = 1024
"""

# A script begins with this: `how` is what a test says, and `tell` prints what it hears.
HEAD = """
import json, os, sys, torch
from protocol.digest import digest
from worker.state.parameters import trainable_parameters

how = json.loads(sys.argv[1])
accumulate = 2 // how["processes"]
told = {"rows": [], "rates": [], "steps": []}

def tell(model):
    vector = torch.cat([each.detach().reshape(-1) for each in trainable_parameters(model).values()])
    said = json.dumps({**told, "digest": digest(vector.numpy().tobytes()).hex()})
    sys.stdout.write(f"\\n{said}\\n")  # in one write: torchrun's processes share a pipe, and print makes two
"""


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


def start(running: InThread, source: str, directory: Path, **how: Any) -> Script:
    """Start HEAD and `source` in `directory`, by torchrun in several `processes`; `how` is for the script."""
    source, processes = HEAD + source, how["processes"]
    environment = script_environment(running, directory)
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


def told(running: InThread, name: str) -> WorkerInfo:
    """What the coordinator says of a worker."""
    with running.client() as http:
        return WorkerInfo.model_validate(http.get(f"/v1/runs/trained/workers/{name}").json())
