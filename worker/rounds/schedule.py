"""When, within a round of H inner steps, each fragment is sent and merged. Pure.

    classic    all are sent and merged after step H                                 DiLoCo, arXiv 2311.08105
    spread     one after the other is merged, H/P steps apart, the last after H     Streaming DiLoCo, arXiv 2501.18512
    overlap τ  each is sent τ steps before it is merged                             the same
    eager      τ = H: sent at the round's beginning, merged at its end              Eager updates, arXiv 2502.12996

So a round begins and ends within its own H steps whatever the overlap is: what is trained after a fragment was sent is
in its next contribution. The last round has no next one, so there all are sent at its end.

When a round's next transfers are near: a moment before them, connections are opened, which on far lines takes some
round trips of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from protocol.spec.sections import SyncSpec


@dataclass(frozen=True)
class Schedule:
    """After which inner step each fragment is sent and merged, by fragment; 0 is the round's beginning."""

    sent: list[int]
    merged: list[int]

    @property
    def overlaps(self) -> bool:
        """True if the training goes on while some fragment travels."""
        return self.sent != self.merged


def schedule(sync: SyncSpec, fragments: int, inner_steps: int, *, last: bool, first: bool) -> Schedule:
    """Return the schedule of a worker with `inner_steps` = H in this round; 0 < sent + overlap, sent <= merged <= H.

    `last`: of the run. `first`: this worker has nothing yet that a fragment sent at the beginning could hold, so that
    one is sent half-way.
    """
    h = inner_steps
    if last:
        return Schedule([h] * fragments, [h] * fragments)
    overlap = h if sync.overlap == "eager" else sync.overlap * h // sync.schedule_steps
    merged = [-(-h * (p + 1) // fragments) if sync.offsets == "spread" else h for p in range(fragments)]
    sent = [max(each - overlap, 0) for each in merged]
    if first:
        sent = [early or -(-late // 2) for early, late in zip(sent, merged, strict=True)]
    return Schedule(sent, merged)


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
