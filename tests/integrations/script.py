"""A training script as a process of its own, a worker of one run, and what it tells at its end: JSON in its last line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.coordinator import InThread
from protocol.messages import Scope, WorkerInfo


def start(running: InThread, source: str, directory: Path, processes: int = 1, **how: Any) -> "subprocess.Popen[str]":
    """Start `source`, Python, in `directory`, by torchrun in several `processes`; its first argument is `how`, JSON."""
    environment = {
        "OUTERSTEP_URL": running.url,
        "OUTERSTEP_TOKEN": running.token(Scope.WORKER),
        "HOME": str(directory),
        "OMP_NUM_THREADS": "1",
    }
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", source, json.dumps(how)]
    if processes > 1:
        (directory / "script.py").write_text(source)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *torchrun, str(directory / "script.py"), json.dumps(how)]
    return subprocess.Popen(command, env=os.environ | environment, cwd=directory, stdout=pipe, stderr=pipe, text=True)


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What it told, and its stderr as `errors`; it must have ended well."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told | {"errors": errors}


def told(running: InThread, run: str, name: str) -> WorkerInfo:
    """What the coordinator says of a worker."""
    with running.client() as http:
        return WorkerInfo.model_validate(http.get(f"/v1/runs/{run}/workers/{name}").json())
