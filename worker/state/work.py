"""Work that is in no mean yet: the units it was trained on, the contribution it becomes, what is carried on afterwards.
Pure.

Units are ranges: lists of [start, stop), in the order in which they are trained on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from torch import Tensor

from outerstep.common.ranges import merged

UnitRanges = list[list[int]]


def numbers(units: UnitRanges) -> Iterator[int]:
    """Yield the numbers of the units, one by one."""
    return chain.from_iterable(range(start, stop) for start, stop in units)


def count(units: UnitRanges) -> int:
    """Return the number of units."""
    return sum(stop - start for start, stop in units)


def in_order(units: UnitRanges) -> UnitRanges:
    """Return the same units in as few ranges as possible, ascending. Raises ValueError or TypeError if it is no list of
    ranges."""
    return [list(each) for each in merged(sorted(units))]


def first_units(units: UnitRanges, most: int) -> UnitRanges:
    """Return the ranges of the first `most` of `units`."""
    taken: UnitRanges = []
    for start, stop in units:
        length = min(stop - start, most)
        if length > 0:
            taken.append([start, start + length])
        most -= length
    return taken


def last_units(units: UnitRanges, most: int) -> UnitRanges:
    """Return the ranges of the last `most` of `units`."""
    skipped, left = count(units) - most, []
    for start, stop in units:
        if stop - start > max(skipped, 0):
            left.append([start + max(skipped, 0), stop])
        skipped -= stop - start
    return left


def units_left(named: UnitRanges, consumed: int) -> UnitRanges:
    """Return the units that no accepted contribution has consumed: `named` without the first `consumed` of them."""
    return last_units(named, count(named) - consumed)


T = TypeVar("T")


@dataclass(frozen=True)
class Missed:
    """A round closed without this worker's fragment. `mean`: of the others, float32[n]; `share`: of all workers in
    it."""

    mean: Tensor
    share: float


@dataclass(frozen=True)
class Superseded:
    """Another contribution of this worker to the fragment stands, from an earlier process that trained on other units.
    It is unknown which of these units the mean contains, so none of this round's work goes into the next one."""


# What a round's mean lacks of a contribution: all of it, an unknown part, what the codec left out, or nothing.
Residual = Missed | Superseded | Tensor | None


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
    def part(self) -> Tensor:
        """The part of the next pseudo-gradient, float32[n]."""
        return self.lacking * self.share


@dataclass(frozen=True)
class Carry:
    """Progress that is in this worker's parameters but in no mean yet: it goes into the next contribution.

    late            by late fragment
    unsent          by accepted fragment: what the codec left out of it, float32[n]; all of it goes into the next
                    contribution (error feedback, as in SparseLoCo, arXiv 2508.15706, but without decay)
    ahead           by fragment: what was trained while it was in flight, float32[n]
    units           those that no accepted contribution has consumed
    fresh           by fragment: how many units it was trained on since it was sent
    waited          for how many of these inner steps the worker waited for others: from the end of its upload to the
                    publication of the deltas
    weight, inner_steps, loss    of the last contribution, for a contribution that adds nothing to it
    """

    late: dict[int, Late] = field(default_factory=dict)
    units: UnitRanges = field(default_factory=list)
    weight: int = 0
    inner_steps: int = 0
    loss: float | None = None
    unsent: dict[int, Tensor] = field(default_factory=dict)
    ahead: dict[int, Tensor] = field(default_factory=dict)
    fresh: dict[int, int] = field(default_factory=dict)
    waited: int = 0

    def part(self, p: int) -> Tensor | None:
        """The carry's part of the next pseudo-gradient, float32[n]; training starts from the global parameters less
        this."""
        left = self.late[p].part if p in self.late else self.unsent.get(p)
        ahead = self.ahead.get(p)
        if left is None or ahead is None:
            return ahead if left is None else left
        return left + ahead

    @property
    def steps_ahead(self) -> int:
        """The inner steps since everything was sent that are the first of the next H. Steps while others were waited
        for are not: if they counted, this worker would send as much earlier next time, wait for as long, and so train
        on old parameters for good. The first of those counts, since the coordinator averages meanwhile: else each box
        would take it for waiting, and every round of equal boxes would be a step longer."""
        return max(min(self.fresh.values(), default=0) - max(self.waited - 1, 0), 0)

    def is_of_rounds_before(self, round_number: int) -> bool:
        """Return True if all late work is of earlier rounds: it is not if the run was restored from a backup since."""
        return all(late.rounds[-1] < round_number for late in self.late.values())

    def with_residual(self, contribution: "Contribution", left: Residual) -> "Carry":
        """Return the same carry, except that the contribution's fragment carries what the mean lacks of it, `left`."""
        p = contribution.fragment
        late = contribution.missed(left) if isinstance(left, Missed) else None
        unsent = left if isinstance(left, Tensor) else None
        return replace(
            self,
            late=_with(self.late, p, late),
            unsent=_with(self.unsent, p, unsent),
            ahead=_with(self.ahead, p, None),
        )

    def with_ahead(self, p: int, ahead: Tensor | None) -> "Carry":
        """Return the same carry with `ahead` for fragment p."""
        return replace(self, ahead=_with(self.ahead, p, ahead))


@dataclass(frozen=True)
class Contribution:
    """What one worker contributes to one fragment in one round.

    pseudo_gradient    float32[n], in host memory, including the carry; `norm`: of this
    units              those that it was trained on, and those that are carried
    weight             the number of this round's units in it; if it has none, that of the last contribution
    inner_steps        those that it was trained for
    loss               mean training loss, nats per token; None if the training loop has reported none
    late               the late work in `pseudo_gradient`
    """

    round: int
    fragment: int
    units: UnitRanges
    weight: int
    inner_steps: int
    loss: float | None
    norm: float
    pseudo_gradient: Tensor
    late: Late | None = None

    @property
    def all_weighs(self) -> bool:
        """True if it contains no work of other rounds."""
        return self.late is None and self.weight == count(self.units)

    def missed(self, missed: Missed) -> Late:
        """Return the late work on the fragment, once the round has closed without it."""
        before = self.late
        if before is None:
            return Late(self.pseudo_gradient - missed.mean, missed.share, [self.round])
        fresh = self.pseudo_gradient - before.part
        return Late(fresh + before.lacking - missed.mean, missed.share, [*before.rounds, self.round])


@dataclass(frozen=True)
class Work:
    """All that this process contributes to a round, made while the training stands still: one contribution to each
    fragment that it owns."""

    round: int
    contributions: list[Contribution]


@dataclass(frozen=True)
class RoundStart:
    """The start of the training of `round`: the local parameters `local` of each fragment, float32[n], in host memory,
    trained from the global ones less `carry`. Fragments of other processes are empty."""

    round: int
    local: list[Tensor]
    carry: Carry


def _with(by_fragment: dict[int, T], p: int, value: T | None) -> dict[int, T]:
    others = {q: each for q, each in by_fragment.items() if q != p}
    return others if value is None else others | {p: value}
