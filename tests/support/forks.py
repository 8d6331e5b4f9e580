"""Processes that are forked from one which has imported the product, and has done nothing else: there is one for all
tests, so all say here what it imports. Python and these imports take a process seconds otherwise, on all of a core."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it once, in the server
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(
    [
        "tests.support.crashing",
        "pytest",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "lightning.pytorch",
        "transformers.trainer",
        "outerstep.cli",
        "worker.agent",
    ]
)

# The command `outerstep`, as the source of a Forked.
OUTERSTEP = "from outerstep.cli import main; main()"


class Process(Protocol):
    """What a subprocess.Popen and a Forked have."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


class Forked:
    """`python -c source arguments…`, in a process so forked, whose stdout and stderr are appended to files."""

    def __init__(
        self, source: str, arguments: list[str], environment: dict[str, str], out: Path, errors: Path, directory: Path
    ) -> None:
        self._process = START.Process(
            target=_run, args=(source, arguments, environment, out, errors, directory), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _run(
    source: str, arguments: list[str], environment: dict[str, str], out: Path, errors: Path, directory: Path
) -> None:
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = ["-c", *arguments]
    for stream, path in ((sys.stdout, out), (sys.stderr, errors)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    try:
        exec(compile(source, "source", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
