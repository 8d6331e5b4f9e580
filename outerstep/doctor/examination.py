"""Findings, and the examination that collects them: checks one after the other, each with a time limit."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import httpx

from outerstep.common.exit_codes import Exit
from outerstep.common.quantities import duration_text
from protocol.errors import OuterstepError, Problem, Remedy, Transient
from worker.line.retry import describe


class State(StrEnum):
    FINE = "fine"
    WARNING = "warning"  # the worker can train anyway
    WRONG = "wrong"
    SKIPPED = "skipped"  # because something that it needs is wrong


@dataclass(frozen=True)
class Finding:
    """The result of a check. `remedy`: how to fix it, if `said` does not say so. `passing`: the problem is in the
    network or the coordinator, so a retry may help."""

    name: str
    state: State
    said: str
    remedy: str = ""
    passing: bool = False


def fine(name: str, said: str) -> Finding:
    return Finding(name, State.FINE, said)


def warning(name: str, said: str, remedy: str = "") -> Finding:
    return Finding(name, State.WARNING, said, remedy)


def wrong(name: str, said: str, remedy: str = "", *, passing: bool = False) -> Finding:
    return Finding(name, State.WRONG, said, remedy, passing)


def skipped(name: str, why: str) -> Finding:
    return Finding(name, State.SKIPPED, f"not checked: {why}")


@dataclass(frozen=True)
class Conclusion:
    """The exit code and the last lines of an examination."""

    code: Exit
    lines: list[str]


def conclude(findings: Sequence[Finding], command: str) -> Conclusion:
    """Return the conclusion: `command`, which starts the worker, or the problems to fix first."""
    faults = [each for each in findings if each.state is State.WRONG]
    if not faults:
        return Conclusion(Exit.DONE, [f"ready to train: start it with: {command}"])
    code = Exit.RETRY if all(each.passing for each in faults) else Exit.REFUSED
    listed = [f"{each.name}: {each.said}" + (f"; {each.remedy}" if each.remedy else "") for each in faults]
    return Conclusion(
        code, [f"not ready: {len(faults)} {'problem' if len(faults) == 1 else 'problems'} to fix", *listed]
    )


T = TypeVar("T")

ENDING_S = 5.0  # extra time for a check that stops when asked to


class Listener(Protocol):
    """Shows the progress of an examination."""

    def begin(self, name: str) -> None: ...
    def found(self, finding: Finding) -> None: ...


class OutOfTime(Exception):
    """A check exceeded its time limit."""


class Examination:
    """Runs checks and collects their `findings`."""

    def __init__(self, teller: Listener) -> None:
        self._teller = teller
        self.findings: list[Finding] = []

    def check(
        self,
        name: str,
        look: Callable[[threading.Event], T],
        judge: Callable[[T], list[Finding]],
        *,
        within_s: float,
        late: Callable[[], Finding] | None = None,
    ) -> T | None:
        """Call `look`, add the findings that `judge` makes of its result, and return the result. If `look` fails, add a
        finding and return None. `look` gets an event that is set at its time limit; `late` makes the finding then."""
        self._teller.begin(name)
        with _warnings() as warned:
            try:
                seen: T | None = _within(within_s, look)
            except OutOfTime:
                said = f"not done within {duration_text(within_s)}"
                found = [late() if late else wrong(name, said, "run the doctor again", passing=True)]
                seen = None
            except Exception as error:  # noqa: BLE001, the other checks must still run
                found, seen = [_fault(name, error)], None
            else:
                assert seen is not None
                found = judge(seen)
        for each in [*found, *(warning(name, text) for text in warned)]:
            self._add(each)
        return seen

    def conclude(self, name: str, found: list[Finding]) -> None:
        """Add findings that follow from an earlier look."""
        self._teller.begin(name)
        for each in found:
            self._add(each)

    def skip(self, names: list[str], why: str) -> None:
        """Record that these checks were skipped."""
        for name in names:
            self.conclude(name, [skipped(name, why)])

    def is_wrong(self, name: str) -> bool:
        """True if a check of this name found something wrong."""
        return any(each.name == name and each.state is State.WRONG for each in self.findings)

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._teller.found(finding)


def _within(seconds: float, look: Callable[[threading.Event], T]) -> T:
    """Return what `look` returns, or raise what it raises. Raises OutOfTime at the time limit; the thread then
    continues until it notices `stop` or the process ends."""
    stop, ended = threading.Event(), Future[T]()

    def run() -> None:
        try:
            ended.set_result(look(stop))
        except BaseException as error:  # noqa: BLE001, it is raised again below
            ended.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return ended.result(seconds)
    except TimeoutError as error:
        if ended.done():  # raised by `look` itself
            raise
        raise OutOfTime from error
    finally:  # also on Ctrl-C
        stop.set()
        thread.join(ENDING_S)


def _fault(name: str, error: Exception) -> Finding:
    match error:
        case Problem():
            return wrong(name, error.detail, passing=error.remedy is Remedy.RETRY)
        case Transient() | httpx.TransportError():
            return wrong(name, describe(error), passing=True)
        case OuterstepError() | ValueError() | OSError():
            return wrong(name, str(error))
        case _:
            return wrong(name, f"unexpected error: {type(error).__name__}: {error}")


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
