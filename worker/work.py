"""What a worker has done since its last accepted contribution, and what came of handing it in."""

from dataclasses import dataclass, field

from torch import Tensor

UnitRanges = list[list[int]]


@dataclass(frozen=True)
class Missed:
    """A round closed without this worker's fragment: with the mean, float32[n], of the others, `share` of all."""

    mean: Tensor
    share: float


@dataclass(frozen=True)
class Late:
    """Late work on one fragment: what the means of `rounds` together lack of it, float32[n], in host memory.

    Of one late Δ_w that is Δ_w − Δ̄. Had it been in time, the mean over all n workers would have been Δ̄ + (Δ_w − Δ̄) / n.
    The next mean divides by those who are in it: as many, it is taken, as were in the last one, so `share` · n. So
    `share` times what is lacking goes into the next contribution, with the weight of one round. (To carry the whole Δ_w
    would take once more what all workers have in common: the outer step would be too long.)
    """

    lacking: Tensor
    share: float
    rounds: list[int]

    @property
    def delta(self) -> Tensor:
        """The part of the next pseudo-gradient, float32[n]."""
        return self.lacking * self.share


@dataclass(frozen=True)
class Carry:
    """Progress that is in this worker's parameters but in no delta yet: it goes into the next contribution.

    `late`: by fragment. `units` are those that no accepted fragment has consumed; `weight` as in Work. `unsent`: by
    fragment that was accepted, what the codec left out of it, float32[n] (error feedback).
    """

    late: dict[int, Late] = field(default_factory=dict)
    units: UnitRanges = field(default_factory=list)
    weight: int = 0
    inner_steps: int = 0
    loss: float = 0.0
    unsent: dict[int, Tensor] = field(default_factory=dict)

    def delta(self, p: int) -> Tensor | None:
        """The part of the next pseudo-gradient, float32[n]; the worker starts from the global parameters less this."""
        return self.late[p].delta if p in self.late else self.unsent.get(p)


@dataclass(frozen=True)
class Work:
    """One round's work, ready to be contributed. `deltas` are the pseudo-gradients of all fragments, float32[n], host
    memory; what is carried along is part of them, and of `units` and `inner_steps`.

    `weight` is the number of this round's own units, or where it has none that of the last round that is carried.
    `late`: what of the deltas is carried, by fragment. `loss` is the mean training loss of this round.
    """

    round: int
    units: UnitRanges
    weight: int
    inner_steps: int
    loss: float
    norms: list[float]
    deltas: list[Tensor]
    late: dict[int, Late] = field(default_factory=dict)


def carry_of(work: Work, missed: dict[int, Missed], unsent: dict[int, Tensor] | None = None) -> Carry:
    """What of `work` goes into the next contribution. `missed`: the fragments that were late. `unsent`: of the others,
    what the codec left out, where it has error feedback; all of it travels on (as in SparseLoCo, arXiv 2508.15706, but
    without decay).

    The coordinator consumes the units with the first fragment that it accepts. So after one acceptance late fragments
    travel on without units; without any, all of it travels on.
    """
    late = {p: _late(work, p, missed[p]) for p in missed}
    if len(missed) < len(work.deltas):
        return Carry(late, unsent=unsent or {})
    return Carry(late, work.units, work.weight, work.inner_steps, work.loss)


def _late(work: Work, p: int, missed: Missed) -> Late:
    before = work.late.get(p)
    if before is None:
        return Late(work.deltas[p] - missed.mean, missed.share, [work.round])
    fresh = work.deltas[p] - before.delta
    return Late(fresh + before.lacking - missed.mean, missed.share, [*before.rounds, work.round])


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
