"""SIGTERM and SIGINT ask a worker to stop."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from worker.errors import Stopped

# From the first signal to the end, whatever hangs: less than the 10 s after which containers are killed.
LEAVE_WITHIN_S = 9.0

log = logging.getLogger(__name__)

_handled = False  # within `stop_on_signals`
_waits = False  # the main thread does nothing but wait for an answer


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first signal end what the main thread does in this block, by Stopped: it only waits for an answer, which
    may take its time, and nobody needs it any more."""
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
    """Set `stop` on SIGTERM and SIGINT: finish the inner step, hand in what is done, leave.

    A second signal ends the process at once. `out_of_time` is called if that takes longer than LEAVE_WITHIN_S. Does
    nothing on another thread than the main one: whoever runs a worker there has the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up() -> None:
        log.warning("leaving has taken %.0f s: gone without goodbye; the lease ends by itself", LEAVE_WITHIN_S)
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
        # On a thread: the main one may be in the middle of logging.
        told = "asked to stop: handing in what is done, and leaving; asked again, it ends at once"
        threading.Timer(0, log.info, [told]).start()
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
