"""How many connections one way of the line rewards.

One TCP connection is bound by loss and by its window long before a far line is full (Mathis et al. 1997: bytes per
second ~ MSS / (round trip · √loss)), and begins slowly after every silence; many add up. On a short clean line one
carries all there is, and others cost requests. Nobody tells which line this is, so it is tried: as long as twice as
many move clearly more, twice as many it is.

How fast one way of the line carries: measured while it is in use, for its width and for whoever asks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from worker.tuning.entropy import Rate

REWARD = 1.25  # what twice as many must bring, as a factor
LOSS = 0.6  # of what was carried before: then the line has changed
TRIED_AGAIN = 32  # measurements after which fewer are tried once


class Width:
    """`now` is the number of connections to use at once: `least`, or twice, four times as many, up to `most`. After
    `saw` it may be another."""

    def __init__(self, least: int, most: int) -> None:
        self.now = self.least = least
        self.most = most
        self._rates: dict[float, float] = {}  # the newest of each width, of this search
        self._growing = True
        self._settled = 0  # measurements since the search was over

    def begin_with(self, count: int) -> None:
        """Begin with so many, and never use fewer from now on."""
        self.least = self.now = min(count, self.most)
        self._rates, self._growing = {}, True

    def saw(self, rate: float, *, full: bool = False) -> None:
        """`rate` bytes per second were carried with `now` connections, all of them busy. `full`: the line itself had
        no room for more."""
        before, self._rates[self.now] = self._rates.get(self.now), rate
        if self._growing:
            if full:
                self._settle(self.now)
            else:
                self._grow(rate)
            return
        self._settled += 1
        if before is not None and rate < LOSS * before and not full:
            self._rates, self._growing = {self.now: rate}, True
            self._grow(rate)
        elif self._settled == TRIED_AGAIN and self.now > self.least:
            self.now //= 2
            self._growing = True

    def _grow(self, rate: float) -> None:
        half, double = self._rates.get(self.now / 2), self._rates.get(2 * self.now)
        if half is not None and rate < REWARD * half:
            self._settle(self.now // 2)
        elif double is not None:
            self._settle(2 * self.now if double >= REWARD * rate else self.now)
        elif 2 * self.now > self.most:
            self._settle(self.now)
        else:
            self.now *= 2

    def _settle(self, width: int) -> None:
        self.now, self._growing, self._settled = width, False, 0
        self._rates = {width: self._rates[width]}


# Less than this fits into buffers on the way at once, however slow the line: its time says nothing.
LEAST_MEASURED_BYTES = 1 << 20
WINDOW_S = 0.25  # of a measurement of the width
SILENCE_S = 1.0


@dataclass(frozen=True)
class _Moment:
    at: float
    carried_bytes: int
    underway_bytes: int


class Meter:
    """The measurements of one way. A turn is taken, carries bytes from some moment on, and is over.

    width             sees the rate as long as all connections that it allows carry something
    rate              sees every LEAST_MEASURED_BYTES, and what a burst ends with if it is as much
    clock, underway   seconds; the bytes that were counted and have not arrived
    full              whether a queue stands before the line

    Not thread-safe.
    """

    def __init__(
        self, width: Width, clock: Callable[[], float], underway: Callable[[], int], full: Callable[[], bool]
    ) -> None:
        self.width, self._clock, self._underway, self._full = width, clock, underway, full
        self.rate = Rate()
        self.window_s = WINDOW_S
        self._last_at = -math.inf  # something moved
        self._warm_at = 0.0  # the first window after a silence is over: connections begin slowly
        self.turns = 0
        self.carrying = 0  # of the turns
        self.carried_bytes = 0
        self._burst: _Moment | None = None  # since when something moves
        self._window: _Moment | None = None  # since when something moves in each turn that may be taken

    def begun(self) -> None:
        """One more turn carries bytes."""
        self.carrying += 1
        if self._burst is None:
            self._burst = self._now()
        self._open_window()

    def moved(self, count: int) -> None:
        now = self._clock()
        if now - self._last_at > SILENCE_S:
            self._warm_at = now + self.window_s
        self._last_at = now
        self.carried_bytes += count
        if self._burst is not None and self.carried_bytes - self._burst.carried_bytes >= LEAST_MEASURED_BYTES:
            self._burst = self._measure(self._burst)
        if self._window is not None and now - self._window.at >= self.window_s:
            arrived_bytes, seconds = self._since(self._window)
            if self._window.at >= self._warm_at:
                self.width.saw(arrived_bytes / seconds, full=self._full())
            self._window = None
            self._open_window()

    def over(self, carried: bool, *, followed: bool) -> None:
        """A turn is over, which has `carried` something or has not, and is `followed` by another at once or is not."""
        self.turns -= 1
        self.carrying -= carried
        if not followed:
            self._window = None
        if self.carrying == 0:
            if self._burst is not None and self.carried_bytes - self._burst.carried_bytes >= LEAST_MEASURED_BYTES:
                self._measure(self._burst)
            self._burst = None

    def _open_window(self) -> None:
        if self._window is None and self.carrying == self.turns >= self.width.now:
            self._window = self._now()

    def _measure(self, since: _Moment) -> _Moment:
        self.rate.add(*self._since(since))
        return self._now()

    def _now(self) -> _Moment:
        return _Moment(self._clock(), self.carried_bytes, self._underway())

    def _since(self, before: _Moment) -> tuple[int, float]:
        """Return the bytes that have arrived since then, and the seconds."""
        now = self._now()
        arrived_bytes = now.carried_bytes - before.carried_bytes - (now.underway_bytes - before.underway_bytes)
        return max(arrived_bytes, 0), max(now.at - before.at, 1e-9)
