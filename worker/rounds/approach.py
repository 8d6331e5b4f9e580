"""When a round's next transfers are near: a moment before them, connections are opened, which on far lines takes some
round trips of its own."""

from collections.abc import Callable

AHEAD_S = 2.0


class Approach:
    """Looks ahead from inner step to inner step, by how long the last one took. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._told_of: tuple[int, int] | None = None

    def is_near(self, round_number: int, due: int, steps_left: int) -> bool:
        """Return True, once for each inner step `due` of a round after which something is sent, if it is at most
        AHEAD_S away, or the next one. To be called after each inner step."""
        now = self._clock()
        step_s, self._last = (0.0 if self._last is None else now - self._last), now
        near = steps_left == 1 or 0 < steps_left * step_s <= AHEAD_S
        if not near or self._told_of == (round_number, due):
            return False
        self._told_of = (round_number, due)
        return True
