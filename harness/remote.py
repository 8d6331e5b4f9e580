"""Processes behind lines that take orders; remote_process.py is their side."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.lines import DEVICE, Line

ROOT = Path(__file__).parents[1]
ENDING_S = 30
SOON_S = 2.0  # as in worker/rounds/schedule.py
GLOO = {"GLOO_SOCKET_IFNAME": DEVICE}  # by default it uses the address of the host name, which does not exist there


class Remote:
    """A process behind a line. `answer` reads its next JSON line; RuntimeError if it has ended."""

    def __init__(self, line: Line, process: subprocess.Popen[str]) -> None:
        self.line = line
        self._process = process

    def order(self, **order: Any) -> None:
        self._send(json.dumps(order))

    def go(self) -> None:
        """Start the work that it is ready for."""
        self._send("go")

    def soon(self) -> None:
        """Announce that the work will start in SOON_S, as a worker knows from its remaining inner steps."""
        self._send("soon")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process behind a line ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def remote(line: Line, module: str) -> Iterator[Remote]:
    """Run `python -m module` behind the line. After the block its stdin is closed; then its process group is killed."""
    command = [*line.prefix, sys.executable, "-m", module]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | GLOO, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )
    with process:
        try:
            yield Remote(line, process)
            process.communicate(timeout=ENDING_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def together(
    workers: Sequence[Remote], rounds: int, silence_s: float, meanwhile: Callable[[], object] = lambda: None
) -> list[list[dict[str, Any]]]:
    """Start all workers together, `rounds` times, each time after `silence_s` seconds. Return their answers.
    `meanwhile` is called when they have started."""
    answers = []
    for _ in range(rounds):
        for worker in workers:
            worker.answer()
        time.sleep(max(silence_s - SOON_S, 0.0))
        for worker in workers:
            worker.soon()
        time.sleep(min(silence_s, SOON_S))
        for worker in workers:
            worker.go()
        meanwhile()
        answers.append([worker.answer() for worker in workers])
    return answers


def seconds(answers: Sequence[dict[str, Any]]) -> float:
    """Return the time from the first start to the last end."""
    return max(each["ended"] for each in answers) - min(each["started"] for each in answers)
