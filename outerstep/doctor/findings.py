"""Findings, and the examination that collects them."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from outerstep.common.exit_codes import Exit
from worker.agent import outcome

T = TypeVar("T")


class State(StrEnum):
    FINE = "fine"
    WARNING = "warning"  # the worker can train anyway
    WRONG = "wrong"


Judgement = tuple[State, str]  # with what was found, in words


@dataclass(frozen=True)
class Finding:
    """The result of a check. `passing`: the problem is in the network or the coordinator, so a retry may help."""

    name: str
    state: State
    said: str
    passing: bool = False


class Listener(Protocol):
    """Shows the progress of an examination."""

    def begin(self, name: str) -> None: ...
    def found(self, finding: Finding) -> None: ...


class Examination:
    """Runs checks, and collects their `findings`."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.findings: list[Finding] = []

    def check(self, name: str, look: Callable[[], T], judge: Callable[[T], Judgement]) -> T | None:
        """Return what `look` returns, and add what `judge` says of it. If `look` raises an error, add that and return
        None. The worker's warnings meanwhile are findings, too."""
        self._listener.begin(name)
        seen: T | None = None
        with _warnings() as warned:
            try:
                seen = look()
                found = Finding(name, *judge(seen))
            except Exception as error:  # noqa: BLE001, other checks may still be possible
                found = _fault(name, error)
        for each in (found, *(Finding(name, State.WARNING, text) for text in warned)):
            self.findings.append(each)
            self._listener.found(each)
        return seen


def _fault(name: str, error: Exception) -> Finding:
    if isinstance(error, ValueError):  # of a setting
        return Finding(name, State.WRONG, str(error))
    code, said = outcome(error)
    if said is None:
        return Finding(name, State.WRONG, f"unexpected error: {type(error).__name__}: {error}")
    return Finding(name, State.WRONG, said, passing=code is Exit.RETRY)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list that collects the warnings logged by the worker's code in the block."""
    texts: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("worker")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def conclude(findings: Sequence[Finding], command: str) -> tuple[Exit, list[str]]:
    """Return the exit code and the last lines: `command`, which starts the worker, or the problems to fix first."""
    faults = [each for each in findings if each.state is State.WRONG]
    if not faults:
        return Exit.DONE, [f"ready to train: start it with: {command}"]
    code = Exit.RETRY if all(each.passing for each in faults) else Exit.REFUSED
    count = f"{len(faults)} {'problem' if len(faults) == 1 else 'problems'}"
    return code, [f"not ready: {count} to fix", *(f"{each.name}: {each.said}" for each in faults)]
