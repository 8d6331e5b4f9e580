"""Real workers for tests, each on one torch thread: `outerstep worker` as a process, or what it is in this one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from harness.coordinator import Running
from protocol.messages import Scope
from tests.support.forks import OUTERSTEP, Forked, Process
from tests.support.waiting import PATIENCE_S
from worker.settings import WorkerSettings


def worker_settings(running: Running, run: str, state_dir: Path, **changes: Any) -> WorkerSettings:
    """What `worker.agent.run_worker` takes in this process: worker `a` on the CPU, but for `changes`. Whoever tests has
    written the spec, so all its places are allowed."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {"name": "a", "device": "cpu", "token": running.token(Scope.WORKER)}
    given |= {"data_root": ("/", "http://", "hub:"), **changes}
    return WorkerSettings(url=running.url, run=run, state_dir=state_dir, **given)


def script_environment(running: Running, home: Path) -> dict[str, str]:
    """The variables of a training script that is a worker."""
    token = running.token(Scope.WORKER)
    return {"OUTERSTEP_URL": running.url, "OUTERSTEP_TOKEN": token, "HOME": str(home), "OMP_NUM_THREADS": "1"}


class WorkerProcess:
    """A worker as the README starts it. The same object started again is the same command again."""

    def __init__(
        self, url: str, run: str, name: str, token: str, state_dir: Path, *, python: Path = Path(sys.executable)
    ) -> None:
        self.name = name
        self.state_dir = state_dir
        self.log = state_dir.parent / f"{state_dir.name}.log"
        self._command = [str(python), "-m", "outerstep", "worker", url, "--run", run, "--name", name]
        self._command += ["--state-dir", str(state_dir), "--device", "cpu", "--data-root", "/"]
        self._environment = {**os.environ, "OUTERSTEP_TOKEN": token, "OMP_NUM_THREADS": "1"}
        self.process: Process | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(timeout)

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        assert self.process is not None
        self.process.terminate()


class ForkedWorker(WorkerProcess):
    """The same command in a process that has its imports behind it."""

    def start(self) -> None:
        arguments = self._command[self._command.index("worker") :]
        self.process = Forked(OUTERSTEP, arguments, self._environment, self.log, self.log, Path.cwd())
