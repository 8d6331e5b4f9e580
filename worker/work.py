"""What a worker has done since its last accepted contribution, and what came of handing it in."""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

UnitRanges = list[list[int]]


@dataclass(frozen=True)
class Work:
    """One round's work, ready to be contributed. `deltas` are the pseudo-gradients of all fragments, float32[n], host
    memory.

    `units` and `inner_steps` include those of late work that is carried along; `loss` is the mean training loss of
    this round.
    """

    round: int
    units: UnitRanges
    inner_steps: int
    loss: float
    norms: list[float]
    deltas: list[Tensor]


class Outcome(Enum):
    """Of one fragment of a contribution."""

    ACCEPTED = "accepted"  # it is in the delta
    LATE = "late"  # the round closed without it


@dataclass(frozen=True)
class Carry:
    """Progress that is in this worker's parameters but in no delta yet: it goes into the next contribution.

    `deltas` holds, per fragment that was late, its pseudo-gradient. `units` are those that no accepted fragment has
    consumed.
    """

    deltas: dict[int, Tensor] = field(default_factory=dict)
    units: UnitRanges = field(default_factory=list)
    inner_steps: int = 0
    loss: float = 0.0


def carry_of(work: Work, outcomes: list[Outcome]) -> Carry:
    """What of `work` goes into the next contribution.

    The coordinator consumes the units with the first fragment that it accepts. So after one acceptance late fragments
    travel on without units; without any, all of it travels on.
    """
    late = {p: work.deltas[p] for p, outcome in enumerate(outcomes) if outcome is Outcome.LATE}
    if Outcome.ACCEPTED in outcomes:
        return Carry(late)
    return Carry(late, work.units, work.inner_steps, work.loss)


def first_units(units: UnitRanges, count: int) -> UnitRanges:
    """The ranges of the first `count` of `units`."""
    taken: UnitRanges = []
    for start, stop in units:
        length = min(stop - start, count)
        if length > 0:
            taken.append([start, start + length])
        count -= length
    return taken
