"""Ranges of work units: lists of [start, stop), in the order in which they are trained on. Pure.

What a worker has trained that is in no mean yet: as it is contributed, and what of it is carried on afterwards.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from torch import Tensor

from outerstep.common.ranges import merged

UnitRanges = list[list[int]]


def numbers(units: UnitRanges) -> Iterator[int]:
    """The numbers of the units, one by one."""
    return chain.from_iterable(range(start, stop) for start, stop in units)


def count(units: UnitRanges) -> int:
    """The number of units."""
    return sum(stop - start for start, stop in units)


def in_order(units: UnitRanges) -> UnitRanges:
    """Return the same units in as few ranges as possible, ascending. Raises ValueError or TypeError where it is no list
    of ranges."""
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
    """Return the units that no accepted contribution has consumed: `named`, but for the first `consumed` of them."""
    return last_units(named, count(named) - consumed)


T = TypeVar("T")


@dataclass(frozen=True)
class Missed:
    """A round closed without this worker's fragment: with the mean, float32[n], of the others, `share` of all."""

    mean: Tensor
    share: float


@dataclass(frozen=True)
class Superseded:
    """Another contribution of this worker to the fragment stands, of an earlier process that trained on other units.
    What of these the mean has is not known here, so nothing of this round's work goes into the next one."""


# What a round's mean lacks of a contribution: all of it, nobody knows what, what the codec left out of it, or nothing.
Left = Missed | Superseded | Tensor | None


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
    """Progress that is in this worker's parameters but in no mean yet: it goes into the next contribution.

    late            by fragment that was late
    unsent          by fragment that was accepted: what the codec left out of it, float32[n]; all of it travels on
                    (error feedback, as in SparseLoCo, arXiv 2508.15706, but without decay)
    ahead           by fragment: what was trained while it was on its way, float32[n]
    units           those that no accepted contribution has consumed
    fresh           by fragment: how many units it was trained on since it was sent
    weight, inner_steps, loss    of the last contribution, for one that adds nothing to it
    """

    late: dict[int, Late] = field(default_factory=dict)
    units: UnitRanges = field(default_factory=list)
    weight: int = 0
    inner_steps: int = 0
    loss: float | None = None
    unsent: dict[int, Tensor] = field(default_factory=dict)
    ahead: dict[int, Tensor] = field(default_factory=dict)
    fresh: dict[int, int] = field(default_factory=dict)

    def delta(self, p: int) -> Tensor | None:
        """The part of the next pseudo-gradient, float32[n]; the worker starts from the global parameters less this."""
        left = self.late[p].delta if p in self.late else self.unsent.get(p)
        ahead = self.ahead.get(p)
        if left is None or ahead is None:
            return ahead if left is None else left
        return left + ahead

    def is_of_rounds_before(self, round_number: int) -> bool:
        """Return True if all late work is of earlier rounds: not so where the run went back to a backup since."""
        return all(late.rounds[-1] < round_number for late in self.late.values())

    def lacking(self, contribution: "Contribution", left: Left) -> "Carry":
        """Return the same, except that of the contribution's fragment is carried what the mean lacks of it, `left`."""
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
        """Return the same with `ahead` of fragment p."""
        return replace(self, ahead=_with(self.ahead, p, ahead))


@dataclass(frozen=True)
class Contribution:
    """What one worker contributes to one fragment in one round.

    delta          its pseudo-gradient, float32[n], in host memory, and `norm` that one's; what is carried is part of it
    units          those that it was trained on, and those that are carried
    weight         the number of this round's own units in it, or where it has none that of the last one that is carried
    inner_steps    those that it was trained for
    loss           mean training loss, nats per token; None where the training loop has reported none
    late           what of `delta` is late work
    clipped        what the run's [privacy] has multiplied the pseudo-gradient by; `delta` is what came of it
    noise_key      the secret of the noise that is added to `delta` as it leaves; empty: nothing is
    """

    round: int
    fragment: int
    units: UnitRanges
    weight: int
    inner_steps: int
    loss: float | None
    norm: float
    delta: Tensor
    late: Late | None = None
    clipped: float = 1.0
    noise_key: str = field(default="", repr=False)  # in hexadecimal: snapshots are read without unpickling bytes

    @property
    def unclipped(self) -> Tensor:
        """The pseudo-gradient as it was trained, float32[n], but for rounding."""
        return self.delta if self.clipped == 1.0 else self.delta / self.clipped

    @property
    def all_weighs(self) -> bool:
        """True if no work of other rounds is in it."""
        return self.late is None and self.weight == count(self.units)

    def missed(self, missed: Missed) -> Late:
        """Return the late work on it, once the round has closed without it."""
        before = self.late
        if before is None:
            return Late(self.delta - missed.mean, missed.share, [self.round])
        fresh = self.delta - before.delta * self.clipped
        return Late(fresh + before.lacking - missed.mean, missed.share, [*before.rounds, self.round])


@dataclass(frozen=True)
class Work:
    """All that this process contributes to a round, one contribution to each fragment that it owns, made while the
    training stands still."""

    round: int
    contributions: list[Contribution]


@dataclass(frozen=True)
class RoundStart:
    """What the training of `round` starts from: the local parameters `local` of each fragment, float32[n], in host
    memory, that were trained from the global ones less `carry`. Of those that another process owns there is nothing."""

    round: int
    local: list[Tensor]
    carry: Carry


def _with(by_fragment: dict[int, T], p: int, value: T | None) -> dict[int, T]:
    others = {q: each for q, each in by_fragment.items() if q != p}
    return others if value is None else others | {p: value}
