"""The demo's processes. Each has a log file; they are watched and end together."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import OuterstepError

ROOT = Path(__file__).parents[2]  # contains our packages
READY = re.compile(r"^outerstep coordinator ready at (\S+)$", re.MULTILINE)
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 10.0
POLL_S = 0.05
SHOWN_LOG_LINES = 20


class ChildError(OuterstepError):
    """A process of the demo ended too early or did not start. The message includes its last log lines."""


@dataclass(frozen=True)
class Child:
    """A running process. `log` contains its standard output and standard error."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def failure(self, what: str) -> ChildError:
        lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
        return ChildError("\n".join([f"{self.name} {what}; its last log lines:", *(f"  {line}" for line in lines)]))


class Processes:
    """Processes that end with the `with` block. The one started first, the coordinator, ends last."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.children: list[Child] = []

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start the command `outerstep` with `arguments`. `environment` is added to this process's environment, except
        its settings of other coordinators: the demo must not share their database.

        The working directory is not searched for packages, unless ours are there, so nothing in it can shadow them.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OUTERSTEP_COORDINATOR_")}
        log = self.logs / f"{name}.log"
        safe_path = [] if Path.cwd().samefile(ROOT) else ["-P"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *safe_path, "-m", "outerstep.demo.child", *arguments],
                stdin=subprocess.PIPE,  # held open: see child.py
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
                # A terminal's Ctrl-C reaches only the demo, which then ends the others in order.
                start_new_session=True,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raise ChildError if a process has failed."""
        for child in self.children:
            code = child.process.poll()
            if code:
                raise child.failure(_ending(code))

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _stop(self.children[1:])
            _stop(self.children[:1])
        finally:
            for child in self.children:
                child.process.kill()
                child.process.wait()
                if child.process.stdin:
                    child.process.stdin.close()


def wait_until_ready(coordinator: Child) -> str:
    """Return the URL that a coordinator serves at. Raises ChildError if it ends, or is not ready within a minute."""
    deadline = time.monotonic() + READY_WITHIN_S
    while not (ready := READY.search(coordinator.log.read_text(errors="replace"))):
        code = coordinator.process.poll()
        if code is not None:
            raise coordinator.failure(_ending(code))
        if time.monotonic() > deadline:
            raise coordinator.failure(f"was not ready within {READY_WITHIN_S:.0f} s")
        time.sleep(POLL_S)
    return ready[1]


def wait_until_ended(child: Child, within_s: float) -> None:
    """Wait for a process that is about to end. Raises ChildError if it does not end in time, or fails."""
    try:
        code = child.process.wait(within_s)
    except subprocess.TimeoutExpired as error:
        raise child.failure(f"did not end within {within_s:.0f} s") from error
    if code:
        raise child.failure(_ending(code))


def unreachable(child: Child) -> ChildError:
    """Return the error to raise if `child` does not answer; most likely it has just ended."""
    try:
        return child.failure(_ending(child.process.wait(POLL_S)))
    except subprocess.TimeoutExpired:
        return child.failure("does not answer")


def _stop(children: Sequence[Child]) -> None:
    """Terminate `children` at once; kill those that have not ended after STOP_WITHIN_S."""
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + STOP_WITHIN_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
