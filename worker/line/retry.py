"""Retries without end: no outage of the coordinator or of the data source ends a worker, however long it is.

Transient faults (no connection, a proxy's 5xx or 429, a broken body, problems whose remedy is `retry`) are retried
after a capped exponential backoff with full jitter, or after the server's Retry-After. When several calls wait, the
first to get through wakes the others, so all continue as soon as the line is back. The log has the first failure, then
one line a minute, then the end of the outage. If one call's connection is cut again and again while others get through,
it is no outage: the log names the request, and a proxy as the likely cause.
"""

import copy
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception

from outerstep.common.answers import header_number
from outerstep.common.connections import check_address, error_text
from outerstep.common.quantities import bytes_text
from protocol.errors import NoCoordinator, NotUnderstood, Problem, Remedy, Transient, UnexpectedAnswer
from worker.errors import Stopped

T = TypeVar("T")

BACKOFF_FIRST_S = 1.0
BACKOFF_CAP_S = 10.0
RETRY_AFTER_CAP_S = 300.0
LOOKS_S = 0.25  # interval of checking whether another call got through
LOG_EVERY_S = 60.0
CUTS = 3  # of one request's connection while others get through, before something between is suspected

log = logging.getLogger(__name__)


class Signal(Protocol):
    """Ends a wait: a `threading.Event`, or a `GracePeriod`."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


class Outage:
    """Logs an outage of `peer`: its beginning, one line a minute, and its end."""

    def __init__(self, clock: Callable[[], float], peer: str) -> None:
        self._clock, self._peer = clock, peer
        self._lock = threading.Lock()
        self._since: float | None = None
        self._logged, self._named_at = 0.0, -math.inf
        self.ended = 0  # outages so far
        self.has_answered = False

    def failed(self, error: BaseException, wait_s: float) -> None:
        """Log a failed attempt; the next one follows after `wait_s`."""
        now = self._clock()
        with self._lock:
            first = self._since is None
            if self._since is None:
                self._since = now
            elif now - self._logged < LOG_EVERY_S:
                return
            self._logged, since = now, self._since
        if first:
            log.warning("%s; retrying in %.1f s, then until it succeeds", describe(error), wait_s)
        else:
            log.warning("%s; still retrying after %.0f s", describe(error), now - since)

    def cut(self, error: httpx.TransportError, times: int) -> None:
        """Log that one request's connection was cut `times` times while others got through, at most once a minute."""
        now = self._clock()
        with self._lock:
            if now - self._named_at < LOG_EVERY_S:
                return
            self._named_at = now
        log.warning(
            "%s %s: the connection was cut %d times%s (%s), although the coordinator answers other requests. A proxy "
            "in between may limit the size of bodies or their time: it must pass on bodies of any size, unbuffered "
            "(docs/deployment.md, A proxy in front); still retrying",
            error.request.method,
            error.request.url.path,
            times,
            _size_sent(error.request),
            error_text(error),
        )

    def over(self) -> None:
        """Note a success; log the end of the outage if there was one."""
        self.has_answered = True
        with self._lock:
            since, self._since = self._since, None
            self.ended += since is not None
        if since is not None:
            log.info("%s answers again after %.0f s", self._peer, self._clock() - since)


class Retry:
    """Calls functions until they succeed or fail permanently. Thread-safe; once `stop` is set, every wait ends with
    Stopped."""

    def __init__(
        self,
        stop: Signal,
        *,
        sleep: Callable[[float], object] | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        peer: str = "the coordinator",
    ) -> None:
        self.stop = stop
        self._sleep = sleep
        self._rng = rng or random.Random()  # the jitter is no secret # nosec B311
        self._outage = Outage(clock, peer)
        self.longest_s = BACKOFF_CAP_S

    def until(self, stop: Signal, *, longest_s: float | None = None) -> "Retry":
        """Return the same with another stop signal, and with backoffs of at most `longest_s` if it is given. Both log
        an outage together, once."""
        other = copy.copy(self)
        other.stop = stop
        other.longest_s = BACKOFF_CAP_S if longest_s is None else min(longest_s, BACKOFF_CAP_S)
        return other

    @property
    def has_answered(self) -> bool:
        """True once the peer has answered: any failure after that is taken for an outage that will end."""
        return self._outage.has_answered

    def pause(self, seconds: float) -> None:
        """Wait. Raises Stopped as soon as `stop` is set."""
        if self._sleep is None:
            self.stop.wait(seconds)
        else:
            self._sleep(seconds)
        if self.stop.is_set():
            raise Stopped("asked to stop")

    def _pause_for_the_line(self, seconds: float) -> None:
        """Wait, but no longer than until another call gets through."""
        ended, slice_s = self._outage.ended, LOOKS_S if self._sleep is None else seconds
        while seconds > 0 and self._outage.ended == ended:
            self.pause(min(seconds, slice_s))
            seconds -= slice_s

    def __call__(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it raises nothing transient, and return its result.

        Raises NoCoordinator if nothing has answered yet and retrying cannot help (a wrong address, an untrusted
        certificate), and NotUnderstood once the same unintelligible answer has come twice.
        """
        if self.stop.is_set():
            raise Stopped("asked to stop")
        line_failed, not_understood, cuts, ended = False, "", 0, self._outage.ended

        def again(error: BaseException) -> bool:
            nonlocal not_understood
            if isinstance(error, NotUnderstood):
                before, not_understood = not_understood, str(error)
                return before != not_understood
            return is_transient(error)

        def wait_s(state: RetryCallState) -> float:
            nonlocal line_failed
            error = state.outcome.exception() if state.outcome else None
            line_failed = isinstance(error, httpx.TransportError)
            return self._wait_s(error, state.attempt_number)

        def note(state: RetryCallState) -> None:
            nonlocal cuts
            error = state.outcome.exception() if state.outcome else None
            is_cut = isinstance(error, _CUT)
            cuts += is_cut
            if isinstance(error, _CUT) and cuts >= CUTS and self._outage.ended > ended:
                self._outage.cut(error, cuts)
            else:
                self._log(state)

        retrying = Retrying(
            retry=retry_if_exception(again),
            wait=wait_s,
            sleep=lambda seconds: (self._pause_for_the_line if line_failed else self.pause)(seconds),
            before_sleep=note,
            reraise=True,
        )
        try:
            result = retrying(lambda: self._checked(attempt))
        except Problem:
            self._outage.over()  # a refusal is an answer too
            raise
        except UnexpectedAnswer as error:
            if self.has_answered or isinstance(error, NotUnderstood):
                raise
            raise NoCoordinator(str(error)) from error
        self._outage.over()
        return result

    def _checked(self, attempt: Callable[[], T]) -> T:
        try:
            return attempt()
        except httpx.TransportError as error:
            if not self.has_answered:
                check_address(_address(error), error)
            raise

    def _wait_s(self, error: BaseException | None, attempt: int) -> float:
        asked: float | None = getattr(error, "retry_after_s", None)
        return self.backoff_s(attempt) if asked is None else min(asked, RETRY_AFTER_CAP_S)

    def backoff_s(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number `attempt`, from 1."""
        ceiling = min(self.longest_s, BACKOFF_FIRST_S * 2 ** min(attempt - 1, 16))
        # Full jitter: workers that lost the same coordinator do not come back in lockstep.
        return self._rng.uniform(0, ceiling)

    def _log(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, NotUnderstood) and state.next_action is not None:
            log.warning("%s; asking once more, in case the bits were flipped on the way", error)
        elif error is not None and state.next_action is not None:
            self._outage.failed(error, state.next_action.sleep)


# Errors of a connection that existed.
_CUT = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)


def _size_sent(request: httpx.Request) -> str:
    """Return the size of the request's body, in words; nothing if it has none."""
    size = header_number(request.headers.get("Content-Length", ""))
    return f" while {bytes_text(size)} were sent" if size else ""


def is_transient(error: BaseException) -> bool:
    """Return True if the same request is worth sending again."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return False
    if isinstance(error, Problem):
        return error.remedy is Remedy.RETRY
    return isinstance(error, Transient | httpx.TransportError)


def describe(error: BaseException) -> str:
    """Return the error as a sentence."""
    if isinstance(error, httpx.TransportError):
        return f"the coordinator at {_address(error)} cannot be reached: {error_text(error)}"
    return str(error)


def _address(error: httpx.TransportError) -> str:
    """Return the origin of the request's URL."""
    url = error.request.url
    return f"{url.scheme}://{url.netloc.decode()}"
