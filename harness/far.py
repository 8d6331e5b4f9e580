"""Processes behind lines, which take orders; orders.py has their side."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from harness.lines import DEVICE, Line

ROOT = Path(__file__).parents[1]
ENDING_S = 30
SOON_S = 2.0  # as worker/rounds/schedule.py
GLOO = {"GLOO_SOCKET_IFNAME": DEVICE}  # by itself it takes the address of the machine's name, which is none there


class Far:
    """One such process. Each of its answers is a JSON line; RuntimeError where it has ended instead."""

    def __init__(self, line: Line, process: subprocess.Popen[str]) -> None:
        self.line = line
        self._process = process

    def order(self, **order: Any) -> None:
        self._send(json.dumps(order))

    def go(self) -> None:
        """Let it begin with what it is ready for."""
        self._send("go")

    def soon(self) -> None:
        """Let it know that it will begin in SOON_S, as the inner steps that are left tell a worker."""
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
def far(line: Line, module: str, python: Path = Path(sys.executable), log: IO[str] | None = None) -> Iterator[Far]:
    """Run `python -m module` behind the line; what it says beside answers goes to `log`, or to stderr. At the end it
    gets no more orders; in the end it and all of its own are gone."""
    command = [*line.prefix, str(python), "-m", module]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | GLOO, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
    )
    with process:
        try:
            yield Far(line, process)
            process.communicate(timeout=ENDING_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def together(
    workers: Sequence[Far], rounds: int, silence_s: float, meanwhile: Callable[[], object] = lambda: None
) -> list[list[dict[str, Any]]]:
    """Let all of them do what they are ready for, `rounds` times, each time after a silence. Return their answers.
    `meanwhile` is called once they have begun."""
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
