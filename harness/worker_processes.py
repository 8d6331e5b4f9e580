"""Workers of one run as processes on this machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from harness.coordinator import Running
from protocol.messages import RoundDetail, RunDetail, Scope, WorkerInfo


class WorkerProcesses:
    """Starts `outerstep worker` for the run `run` on `device`, each with a state directory and a log in `directory`. At
    the end of the `with` block, processes that still run are killed."""

    def __init__(self, running: Running, run: str, directory: Path, *, device: str = "cpu") -> None:
        self._running, self._run, self._directory, self._device = running, run, directory, device
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "WorkerProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._processes.values():
            each.kill()
            each.wait()

    def start(
        self, name: str, *options: str, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a worker with these options, and these variables beside this process's environment. `prefix`: of the
        command, to run it behind a line."""
        command = [*prefix, sys.executable, "-m", "outerstep", "worker", self._running.url]
        command += ["--run", self._run, "--name", name]
        command += ["--state-dir", str(self._directory / name), "--device", self._device, *options]
        variables = {**os.environ, "OUTERSTEP_TOKEN": self._running.token(Scope.WORKER), **(environment or {})}
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        self._processes[name] = process
        return process

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    @property
    def are_training(self) -> bool:
        """True while a worker runs and none has failed: the others would wait for it."""
        codes = [each.poll() for each in self._processes.values()]
        return None in codes and not any(codes)

    def check(self) -> None:
        """Raise RuntimeError with the end of its log if a worker has failed."""
        for name, each in self._processes.items():
            if code := each.poll():
                raise RuntimeError(f"worker {name} ended with exit code {code}: {self._log(name).read_text()[-2000:]}")

    def detail(self) -> RunDetail:
        """Return what the coordinator shows of the run."""
        with self._running.client() as http:
            return RunDetail.model_validate(http.get(f"/v1/runs/{self._run}").raise_for_status().json())

    def round(self, number: int) -> RoundDetail:
        """Return what the coordinator shows of a round."""
        with self._running.client() as http:
            found = http.get(f"/v1/runs/{self._run}/rounds/{number}").raise_for_status().json()
        return RoundDetail.model_validate(found)

    def workers(self) -> list[WorkerInfo]:
        """Return what the coordinator shows of them."""
        with self._running.client() as http:
            found = http.get(f"/v1/runs/{self._run}/workers").raise_for_status().json()
        return [WorkerInfo.model_validate(each) for each in found["items"]]
