"""How many connections one way of the line rewards.

One TCP connection is bound by loss and by its window long before a far line is full (Mathis et al. 1997: bytes per
second ~ MSS / (round trip · √loss)), and begins slowly after every silence; many add up. On a short clean line one
carries all there is, and others cost requests. Nobody tells which line this is, so it is tried: as long as twice as
many move clearly more, twice as many it is.
"""

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
