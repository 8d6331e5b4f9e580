"""How fast one direction of the line is, and how many parallel connections pay off.

On a far line, loss and the window limit one TCP connection long before the line is full (Mathis et al. 1997: bytes per
second ~ MSS / (round trip · √loss)), and it starts slowly after every silence; many connections add up. On a short
clean line, one carries everything and others only cost requests. Nothing reports which kind of line this is, so it is
tried out: the number is doubled as long as that moves clearly more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from worker.tuning.entropy import Rate

REWARD = 1.25  # factor by which twice as many connections must be faster
LOSS = 0.6  # of the rate measured before: below it, the line has changed
TRIED_AGAIN = 32  # measurements after which half as many are tried once


class ParallelConnections:
    """`now` is the number of connections to use at once: `least`, or two, four, … times as many, up to `most`.
    `measured` may change it."""

    def __init__(self, least: int, most: int) -> None:
        self.now = self.least = least
        self.most = most
        self._rates: dict[float, float] = {}  # the newest by number of connections, in this search
        self._growing = True
        self._settled = 0  # measurements since the search ended

    def restart_at(self, count: int) -> None:
        """Start again with `count` connections, and never use fewer from now on."""
        self.least = self.now = min(count, self.most)
        self._rates, self._growing = {}, True

    def measured(self, rate: float, *, full: bool = False) -> None:
        """Note that `now` busy connections moved `rate` bytes per second. `full`: the line had no room for more."""
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

    def _settle(self, parallel: int) -> None:
        self.now, self._growing, self._settled = parallel, False, 0
        self._rates = {parallel: self._rates[parallel]}


# Buffers along the way hold less than this at once, however slow the line, so the time of fewer bytes means nothing.
LEAST_MEASURED_BYTES = 1 << 20
WINDOW_S = 0.25  # of a measurement for the parallel connections
SILENCE_S = 1.0


@dataclass(frozen=True)
class _Moment:
    at: float
    moved_bytes: int
    unacknowledged_bytes: int


class Meter:
    """The measurements of one direction.

        parallel                gets a rate whenever as many connections as it allows were busy for a window
        rate                    gets every LEAST_MEASURED_BYTES, and the end of a burst if it is as long
        clock, unacknowledged   seconds; the bytes that were counted and have not arrived
        full                    returns True if packets queue in front of the line

    Not thread-safe.
    """

    def __init__(
        self,
        parallel: ParallelConnections,
        clock: Callable[[], float],
        unacknowledged: Callable[[], int],
        full: Callable[[], bool],
    ) -> None:
        self.parallel, self._clock, self._unacknowledged, self._full = parallel, clock, unacknowledged, full
        self.rate = Rate()
        self.window_s = WINDOW_S
        self._last_at = -math.inf  # when bytes were last moved
        self._warm_at = 0.0  # end of the first window after a silence: connections start slowly
        self.slots = 0
        self.active = 0  # slots that have moved bytes
        self.moved_bytes = 0
        self._burst: _Moment | None = None  # start of the current burst
        self._window: _Moment | None = None  # start of the window in which all slots are active

    def started(self) -> None:
        """Note that one more slot moves bytes."""
        self.active += 1
        if self._burst is None:
            self._burst = self._now()
        self._open_window()

    def moved(self, count: int) -> None:
        now = self._clock()
        if now - self._last_at > SILENCE_S:
            self._warm_at = now + self.window_s
        self._last_at = now
        self.moved_bytes += count
        if self._burst is not None and self.moved_bytes - self._burst.moved_bytes >= LEAST_MEASURED_BYTES:
            self._burst = self._measure(self._burst)
        if self._window is not None and now - self._window.at >= self.window_s:
            arrived_bytes, seconds = self._since(self._window)
            if self._window.at >= self._warm_at:
                self.parallel.measured(arrived_bytes / seconds, full=self._full())
            self._window = None
            self._open_window()

    def ended(self, moved_any: bool, *, followed: bool) -> None:
        """Note that a slot is released. `moved_any`: it has moved bytes. `followed`: another part takes it at once."""
        self.slots -= 1
        self.active -= moved_any
        if not followed:
            self._window = None
        if self.active == 0:
            if self._burst is not None and self.moved_bytes - self._burst.moved_bytes >= LEAST_MEASURED_BYTES:
                self._measure(self._burst)
            self._burst = None

    def _open_window(self) -> None:
        if self._window is None and self.active == self.slots >= self.parallel.now:
            self._window = self._now()

    def _measure(self, since: _Moment) -> _Moment:
        self.rate.add(*self._since(since))
        return self._now()

    def _now(self) -> _Moment:
        return _Moment(self._clock(), self.moved_bytes, self._unacknowledged())

    def _since(self, before: _Moment) -> tuple[int, float]:
        """Return the bytes that have arrived since then, and the seconds."""
        now = self._now()
        arrived_bytes = now.moved_bytes - before.moved_bytes - (now.unacknowledged_bytes - before.unacknowledged_bytes)
        return max(arrived_bytes, 0), max(now.at - before.at, 1e-9)
