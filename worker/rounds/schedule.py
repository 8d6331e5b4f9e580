"""When, within a round of H inner steps, each fragment is sent and merged. Pure.

    classic    all are sent and merged after step H                                 DiLoCo, arXiv 2311.08105
    spread     one after the other is merged, H/P steps apart, the last after H     Streaming DiLoCo, arXiv 2501.18512
    overlap τ  each is sent τ steps before it is merged                             the same
    eager      τ = H: sent at the round's beginning, merged at its end              Eager updates, arXiv 2502.12996

So a round begins and ends within its own H steps whatever the overlap is: what is trained after a fragment was sent is
in its next contribution. The last round has no next one, so there all are sent at its end.
"""

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
