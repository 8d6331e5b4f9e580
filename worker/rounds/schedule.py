"""When each fragment is sent and merged within a round of H inner steps. Pure.

    classic    all are sent and merged after step H                                 DiLoCo, arXiv 2311.08105
    spread     one after the other is merged, H/P steps apart, the last after H     Streaming DiLoCo, arXiv 2501.18512
    overlap τ  each is sent τ steps before it is merged                             the same
    eager      τ = H: sent at the round's beginning, merged at its end              Eager updates, arXiv 2502.12996
    no wait    all are sent after step H, and merged once all of them have arrived (sync.wait = "never");
               sent at the round's beginning by a worker that is behind, or that did H steps while it waited

So a round begins and ends within its own H steps whatever the overlap is: what is trained after a fragment was sent
goes into its next contribution. The last round of a run has no next one, so everything is sent at its end.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from protocol.spec.sections import SyncSpec

ON_ARRIVAL = sys.maxsize  # for `merged`


@dataclass(frozen=True)
class Schedule:
    """After which inner step each fragment is sent and merged, by fragment; 0 is the beginning of the round."""

    sent: list[int]
    merged: list[int]

    @property
    def overlaps(self) -> bool:
        """True if the training goes on while some fragment is in flight."""
        return self.sent != self.merged

    @property
    def on_arrival(self) -> bool:
        """True if the training goes on until the fragments have arrived."""
        return ON_ARRIVAL in self.merged


def schedule(
    sync: SyncSpec, fragments: int, inner_steps: int, *, last: bool, first: bool, at_once: bool = False
) -> Schedule:
    """Return the schedule of a worker with `inner_steps` = H in this round; 0 < sent + overlap, sent <= merged <= H.

    `last`: the last round of the run. `first`: this worker has no progress yet that a fragment sent at the beginning
    could contain, so it is sent half-way. `at_once`: with `wait = "never"`, send what this worker carries as the round
    begins: rounds close before it has done its inner steps, or it did all of them while the last deltas travelled.
    """
    h = inner_steps
    if last:
        return Schedule([h] * fragments, [h] * fragments)
    if sync.wait == "never":
        return Schedule([0 if at_once else h] * fragments, [ON_ARRIVAL] * fragments)
    overlap = h if sync.overlap == "eager" else sync.overlap * h // sync.inner_steps
    merged = [-(-h * (p + 1) // fragments) if sync.offsets == "spread" else h for p in range(fragments)]
    sent = [max(each - overlap, 0) for each in merged]
    if first:
        sent = [early or -(-late // 2) for early, late in zip(sent, merged, strict=True)]
    return Schedule(sent, merged)


AHEAD_S = 2.0


class Lookahead:
    """Predicts when the next transfers are near, by how long the last inner step took, so that connections can be
    opened just before: on far lines, that takes some round trips. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._reported: tuple[int, int] | None = None

    def is_near(self, round_number: int, due: int, steps_left: int) -> bool:
        """Return True if the transfers due after inner step `due` are the next step or at most AHEAD_S away; once for
        each `due`. Call it after each inner step."""
        now = self._clock()
        step_s, self._last = (0.0 if self._last is None else now - self._last), now
        near = steps_left == 1 or 0 < steps_left * step_s <= AHEAD_S
        if not near or self._reported == (round_number, due):
            return False
        self._reported = (round_number, due)
        return True
