"""What a worker has done since its last accepted contribution, and what came of handing it in."""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

UnitRanges = list[list[int]]


@dataclass(frozen=True)
class Work:
    """One round's work, ready to be contributed. `deltas` are the pseudo-gradients of all fragments, float32[n], host
    memory.

    `units` and `inner_steps` include those of late work that is carried along. `weight` is the number of this round's
    own units, or where it has none that of the last round that is carried. `carried`: per fragment, the rounds whose
    late work is in its delta. `loss` is the mean training loss of this round.
    """

    round: int
    units: UnitRanges
    weight: int
    inner_steps: int
    loss: float
    norms: list[float]
    deltas: list[Tensor]
    carried: list[list[int]]


class Outcome(Enum):
    """Of one fragment of a contribution."""

    ACCEPTED = "accepted"  # it is in the delta
    LATE = "late"  # the round closed without it


@dataclass(frozen=True)
class Carry:
    """Progress that is in this worker's parameters but in no delta yet: it goes into the next contribution.

    `deltas` holds, per fragment that was late, what the published mean lacks of it; `rounds`, since when it has been
    late. `units` are those that no accepted fragment has consumed, `weight` as in Work.
    """

    deltas: dict[int, Tensor] = field(default_factory=dict)
    rounds: dict[int, list[int]] = field(default_factory=dict)
    units: UnitRanges = field(default_factory=list)
    weight: int = 0
    inner_steps: int = 0
    loss: float = 0.0


def carry_of(work: Work, outcomes: list[Outcome], means: dict[int, Tensor]) -> Carry:
    """What of `work` goes into the next contribution. `means`: the published mean of each late fragment, float32[n].

    Of a late Δ_w that is Δ_w − Δ̄. The mean over the others, Δ̄, has been applied in the place of the mean over all,
    which is Δ̄ + (Δ_w − Δ̄) / n: so with the weight of one round in the next mean over n workers, the difference is
    exactly what the model still lacks. To carry all of Δ_w would take once more what all have in common.

    The coordinator consumes the units with the first fragment that it accepts. So after one acceptance late fragments
    travel on without units; without any, all of it travels on.
    """
    late = {p: work.deltas[p] - means[p] for p, outcome in enumerate(outcomes) if outcome is Outcome.LATE}
    rounds = {p: [*work.carried[p], work.round] for p in late}
    if Outcome.ACCEPTED in outcomes:
        return Carry(late, rounds)
    return Carry(late, rounds, work.units, work.weight, work.inner_steps, work.loss)


def count(units: UnitRanges) -> int:
    return sum(stop - start for start, stop in units)


def first_units(units: UnitRanges, most: int) -> UnitRanges:
    """The ranges of the first `most` of `units`."""
    taken: UnitRanges = []
    for start, stop in units:
        length = min(stop - start, most)
        if length > 0:
            taken.append([start, start + length])
        most -= length
    return taken
