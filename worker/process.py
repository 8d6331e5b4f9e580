"""The worker's process: its log, the signals that stop it, and the time that it then has.

Needs no torch, so that the first log line comes before torch is imported.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from outerstep.common.connections import keep_urls_out_of_logs
from protocol.text import PrintableFormatter
from worker.errors import Stopped

_LOGGERS = ("worker", "protocol", "outerstep")  # the packages that run in a script's process
FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_stderr() -> None:
    """Log to stderr, unless this process has logging already. Of several processes of one worker, the first one logs
    everything, the others only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    keep_urls_out_of_logs()
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger().setLevel(logging.WARNING)


@contextmanager
def logging_to_stderr(level: int = logging.INFO) -> Iterator[None]:
    """Log Outerstep's messages to stderr from `level` on, with time and level, unless the script has set up logging
    itself: above all, why the worker waits."""
    loggers = [each for each in map(logging.getLogger, _LOGGERS) if not each.hasHandlers()]
    handler, before = logging.StreamHandler(), [each.level for each in loggers]
    handler.setFormatter(PrintableFormatter(FORMAT))
    for each in loggers:
        each.addHandler(handler)
        each.setLevel(level)
    try:
        yield
    finally:
        for each, was in zip(loggers, before, strict=True):
            each.removeHandler(handler)
            each.setLevel(was)


# From the first signal to the end, whatever hangs; containers are killed after 10 s.
LEAVE_WITHIN_S = 9.0

log = logging.getLogger(__name__)

_handled = False  # within `stop_on_signals`
_waits = False  # the main thread only waits for an answer


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first signal interrupt the main thread in this block, with Stopped: it only waits for an answer, which
    may take long, and nothing needs the answer any more."""
    global _waits
    if not _handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits = True
    try:
        yield
    finally:
        _waits = False


@contextmanager
def stop_on_signals(stop: threading.Event, out_of_time: Callable[[], object] | None = None) -> Iterator[None]:
    """Set `stop` on SIGTERM and SIGINT: the worker finishes the inner step, hands in its work and leaves.

    A second signal ends the process at once. `out_of_time` is called if leaving takes longer than LEAVE_WITHIN_S. Does
    nothing on any thread but the main one, which receives the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up() -> None:
        log.warning("leaving has taken %.0f s: ending the process; the lease will expire", LEAVE_WITHIN_S)
        assert out_of_time is not None
        out_of_time()

    last_resort = threading.Timer(LEAVE_WITHIN_S, give_up)
    last_resort.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if stop.is_set():
            return
        stop.set()
        # On a thread, because the main one may be in the middle of logging.
        message = "asked to stop: handing in the work done and leaving; a second signal ends the process at once"
        threading.Timer(0, log.info, [message]).start()
        if out_of_time is not None:
            last_resort.start()
        if _waits:
            raise Stopped("asked to stop while it waited")

    global _handled
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    outer, _handled = _handled, True
    try:
        yield
    finally:
        _handled = outer
        last_resort.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


HAND_IN_S = 5.0


class GracePeriod:
    """A `Signal` (retry.py) that is set HAND_IN_S after `stop` was first seen set, or after `begin`: the time for
    handing in finished work. Containers have 10 s from SIGTERM to SIGKILL, and the inner step, leaving and the end of
    the process need some of them. Thread-safe."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        self._stop, self._clock = stop, clock
        self._lock = threading.Lock()
        self._over_at: float | None = None

    def begin(self) -> None:
        """Begin the grace period if it has not begun."""
        with self._lock:
            if self._over_at is None:
                self._over_at = self._clock() + HAND_IN_S

    def is_set(self) -> bool:
        if self._stop.is_set():
            self.begin()
        return self._over_at is not None and self._clock() >= self._over_at

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds, less if `stop` is set meanwhile. Return `is_set()`."""
        if not self.is_set():
            if self._over_at is None:
                self._stop.wait(timeout)
            else:
                time.sleep(max(min(timeout, self._over_at - self._clock()), 0.0))
        return self.is_set()


def give_back_free_memory() -> None:
    """Return free memory to the system, where the C library does not do so by itself: glibc keeps what inner steps have
    freed, and a sync needs other memory, on other threads."""
    if _TRIM is not None:
        _TRIM(0)


_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
