"""What a worker has done since its last accepted contribution, and what came of handing it in."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

UnitRanges = list[list[int]]
T = TypeVar("T")


@dataclass(frozen=True)
class Missed:
    """A round closed without this worker's fragment: with the mean, float32[n], of the others, `share` of all."""

    mean: Tensor
    share: float


@dataclass(frozen=True)
class Superseded:
    """Another contribution of this worker to the fragment stands, of an earlier process that trained on other units.
    What of these the mean has is not known here, so nothing of this fragment goes into the next contribution."""


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
    fragment that was accepted, what the codec left out of it, float32[n] (error feedback). `ahead`: by fragment, what
    was trained while it was on its way, float32[n] (streaming.py).
    """

    late: dict[int, Late] = field(default_factory=dict)
    units: UnitRanges = field(default_factory=list)
    weight: int = 0
    inner_steps: int = 0
    loss: float = 0.0
    unsent: dict[int, Tensor] = field(default_factory=dict)
    ahead: dict[int, Tensor] = field(default_factory=dict)

    def delta(self, p: int) -> Tensor | None:
        """The part of the next pseudo-gradient, float32[n]; the worker starts from the global parameters less this."""
        left = self.late[p].delta if p in self.late else self.unsent.get(p)
        ahead = self.ahead.get(p)
        if left is None or ahead is None:
            return ahead if left is None else left
        return left + ahead

    def merged(self, p: int, *, late: Late | None, unsent: Tensor | None, ahead: Tensor | None) -> "Carry":
        """The same, but for what is carried of fragment p."""
        return replace(
            self,
            late=_with(self.late, p, late),
            unsent=_with(self.unsent, p, unsent),
            ahead=_with(self.ahead, p, ahead),
        )


@dataclass(frozen=True)
class Work:
    """One round's work. `deltas` are the pseudo-gradients of the fragments, float32[n], host memory, as far as they
    were gathered, and `norms` theirs; what is carried along is part of them, and of `units` and `inner_steps`.

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

    def piece(self, p: int) -> "Piece":
        """What is contributed to fragment p."""
        return Piece(
            self.round,
            p,
            self.units,
            self.weight,
            self.inner_steps,
            self.loss,
            self.norms[p],
            self.deltas[p],
            self.late.get(p),
        )


@dataclass(frozen=True)
class Piece:
    """What is contributed to one fragment in one round; the fields are those of Work."""

    round: int
    fragment: int
    units: UnitRanges
    weight: int
    inner_steps: int
    loss: float
    norm: float
    delta: Tensor
    late: Late | None = None

    def missed(self, missed: Missed) -> Late:
        """The late work on it, once the round has closed without it."""
        before = self.late
        if before is None:
            return Late(self.delta - missed.mean, missed.share, [self.round])
        fresh = self.delta - before.delta
        return Late(fresh + before.lacking - missed.mean, missed.share, [*before.rounds, self.round])


@dataclass(frozen=True)
class Midway:
    """Where a worker whose training goes on while fragments travel stands as `round` begins: with the local parameters
    `local` of each fragment, float32[n], host memory, that were trained from the global ones less `carry`.

    `fresh`: how many units each fragment was trained on since it was sent last.
    """

    round: int
    local: list[Tensor]
    carry: Carry
    fresh: list[int]


def carry_of(work: Work, missed: dict[int, Missed], unsent: dict[int, Tensor] | None = None) -> Carry:
    """What of `work` goes into the next contribution. `missed`: the fragments that were late. `unsent`: of the others,
    what the codec left out, where it has error feedback; all of it travels on (as in SparseLoCo, arXiv 2508.15706, but
    without decay).

    The coordinator consumes the units with the first fragment that it accepts. So after one acceptance late fragments
    travel on without units; without any, all of it travels on.
    """
    late = {p: work.piece(p).missed(missed[p]) for p in missed}
    if len(missed) < len(work.deltas):
        return Carry(late, unsent=unsent or {})
    return Carry(late, work.units, work.weight, work.inner_steps, work.loss)


def _with(by_fragment: dict[int, T], p: int, value: T | None) -> dict[int, T]:
    others = {q: each for q, each in by_fragment.items() if q != p}
    return others if value is None else others | {p: value}


def count(units: UnitRanges) -> int:
    return sum(stop - start for start, stop in units)


def in_order(units: UnitRanges) -> UnitRanges:
    """The same units in as few ranges as possible, ascending. Raises ValueError or TypeError where it is no list of
    ranges."""
    result: UnitRanges = []
    for start, stop in sorted(units):
        if result and result[-1][1] == start:
            result[-1][1] = stop
        else:
            result.append([start, stop])
    return result


def first_units(units: UnitRanges, most: int) -> UnitRanges:
    """The ranges of the first `most` of `units`."""
    taken: UnitRanges = []
    for start, stop in units:
        length = min(stop - start, most)
        if length > 0:
            taken.append([start, start + length])
        most -= length
    return taken


def last_units(units: UnitRanges, most: int) -> UnitRanges:
    """The ranges of the last `most` of `units`."""
    skipped, left = count(units) - most, []
    for start, stop in units:
        if stop - start > max(skipped, 0):
            left.append([start + max(skipped, 0), stop])
        skipped -= stop - start
    return left
