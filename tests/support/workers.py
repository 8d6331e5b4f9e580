"""Real worker processes for tests: `outerstep worker`, each on one torch thread."""

import os
import subprocess
import sys
from pathlib import Path


class WorkerProcess:
    """A worker as the README starts it. The same object started again is the same command again."""

    def __init__(
        self, url: str, run: str, name: str, token: str, state_dir: Path, *, python: Path = Path(sys.executable)
    ) -> None:
        self.name = name
        self.state_dir = state_dir
        self.log = state_dir.parent / f"{state_dir.name}.log"
        self._command = [str(python), "-m", "outerstep", "worker", url, "--run", run, "--name", name]
        self._command += ["--state", str(state_dir), "--threads", "1", "--device", "cpu"]
        self._environment = {**os.environ, "OUTERSTEP_TOKEN": token}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)

    def wait(self, timeout: float = 120) -> int:
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
