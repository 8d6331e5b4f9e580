"""One examination: its checks one after the other, each within a time of its own, so that none can hang it."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol, TypeVar

import httpx

from outerstep.common.quantities import duration_text
from outerstep.doctor.finding import Finding, State, skipped, warning, wrong
from protocol.errors import OuterstepError, Problem, Remedy, Transient
from worker.line.retry import describe

T = TypeVar("T")

ENDING_S = 5.0  # after its time is over, for a check that heeds `stop`


class Teller(Protocol):
    """What shows an examination as it goes."""

    def begin(self, name: str) -> None: ...
    def found(self, finding: Finding) -> None: ...


class OutOfTime(Exception):
    """A check did not end within its time."""


class Examination:
    """`findings` are those so far."""

    def __init__(self, teller: Teller) -> None:
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
        """Return what `look` saw, once `judge` has told what it means; None where it failed, which is told as well.
        `look` is given an event that is set when its time is over. `late`: what is found then."""
        self._teller.begin(name)
        with _warnings() as warned:
            try:
                seen: T | None = _within(within_s, look)
            except OutOfTime:
                told = f"no end within {duration_text(within_s)}"
                found = [late() if late else wrong(name, told, "start the doctor again", passing=True)]
                seen = None
            except Exception as error:  # noqa: BLE001, whatever it is, the other checks go on
                found, seen = [_fault(name, error)], None
            else:
                assert seen is not None
                found = judge(seen)
        for each in [*found, *(warning(name, told) for told in warned)]:
            self._add(each)
        return seen

    def conclude(self, name: str, found: list[Finding]) -> None:
        """Add what follows from something that was seen already."""
        self._teller.begin(name)
        for each in found:
            self._add(each)

    def skip(self, names: list[str], why: str) -> None:
        """Note that these were not checked."""
        for name in names:
            self.conclude(name, [skipped(name, why)])

    def is_wrong(self, name: str) -> bool:
        """Return True if something of this name was found wrong."""
        return any(each.name == name and each.state is State.WRONG for each in self.findings)

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._teller.found(finding)


def _within(seconds: float, look: Callable[[threading.Event], T]) -> T:
    """Return what `look` returns, or raise what it raises. Raises OutOfTime; its thread goes on until `stop` ends it,
    or the process does."""
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
        if ended.done():  # `look` has raised it
            raise
        raise OutOfTime from error
    finally:  # also of Ctrl-C
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
            return wrong(name, f"an unexpected fault: {type(error).__name__}: {error}")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list to which all that the worker's code warns of meanwhile is added."""
    told: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("worker")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
