"""How much each contribution to a fragment counts: nothing, part of its weight, or all of it. Pure.

Honest pseudo-gradients differ: in the work behind them, in their data, in the hardware. They share a norm of the same
order and a direction. Everything here is measured by the coordinator or taken from its own record; nothing depends on
what a contributor says about itself.

- **Norm.** A norm is compared with the **reference**: the round's median, kept within reach of what was usual in the
  run's last rounds. One beyond CLIPPED times the reference is shortened to the reference, as in centred clipping
  (Karimireddy, He, Jaggi 2021). More than LEFT_OUT times is left out, and so is less than LAZY times. Work of missed
  rounds, by the record, may lengthen a norm to CLIPPED_UNEQUAL times, however many rounds were missed.
- **Direction.** A worker's *agreement* is the median of its cosines with each other contribution, so a minority that
  colludes cannot raise its own. Where all workers train on the same data, their agreement is similar; a contribution
  with less than ALIKE of the usual agreement is left out, the worst one first. That includes noise, and a gradient
  with every second sign flipped: both have an agreement of about 0. Where data differs by worker, only contributions
  that clearly oppose the others are left out. A majority always stays.
- **Copies.** Of contributions that are the same but for rounding, one counts.

If everybody would be left out, nobody is, but all are shortened: a round always has a delta. Of two workers that oppose
each other, nobody can say which is right.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from coordinator.screening.measuring import Measure

CLIPPED = 1.25  # times the reference; equal work on the same data gives norms within 1.2
CLIPPED_UNEQUAL = 1.5  # of more steps than the others' or of late work, for that much work
CLIPPED_OF_OTHER_DATA = 2.0  # and for late work times √(1 + its rounds), MOST_LATE at most: nothing of it is in common
MOST_LATE = 3
CLIPPED_WITH_FEEDBACK = 1.5  # what a codec left out comes in later rounds; newcomers have none of it yet
LEFT_OUT = 10.0
LAZY = 0.1
REACH, REACH_OF_TWO = 20.0, 5.0  # of the reference, from what is usual; the latter with one or two workers
CHANCE = 4.0  # standard deviations of a cosine between sketches
ALIKE = 0.25  # of the usual agreement, of workers that train on the same data
OPPOSED = 0.25  # of the usual agreement, negated, of workers whose data differ
CLOSE = 0.9  # of the usual distance of two directions; honest pairs had 0.88 to 1.1 of it
FEW = 64  # values other than 0: that so few are the same may be chance
COPIED = 0.9999  # the cosine of two sketches above which, with norms as close, one is a copy; fp16 keeps three digits

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """What the coordinator knows of one contribution.

    weight  its share of the round's weight, before it is judged
    work    the work units that it weighs, checked against what its worker was assigned
    late    the number of missed rounds whose work may be in it, by the coordinator's record
    all_late  True if it contains no work of its own round
    """

    measure: Measure
    weight: float
    work: float
    late: int = 0
    all_late: bool = False


@dataclass(frozen=True)
class Verdict:
    """The verdict on one contribution: its weight counts `factor` times, 0 if it is left out, with the reason. `ratio`
    is its norm as a multiple of the reference. `cosine` is its agreement: the median of its cosines with each of the
    other contributions that are not left out; None if there are none."""

    factor: float
    reason: str = ""
    ratio: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The verdicts by worker, and the reference, from which later rounds know what is usual; None if all are zero.
    `alike`: pairs of workers whose directions are closer than their agreement with the others explains, with how far
    they are from each other as a share of that: 0 for the same direction, 1 for what is usual."""

    reference: float | None
    verdicts: dict[str, Verdict]
    alike: dict[tuple[str, str], float] = field(default_factory=dict)


# What each rule of aggregation (`sync.aggregation`) looks at; all others tell, and leave out nobody.
NORMS, DIRECTIONS = frozenset({"screened", "clipped"}), frozenset({"screened"})


def judge(
    evidence: Mapping[str, Evidence],
    usual: float | None = None,
    plausible: float = math.inf,
    *,
    rule: str = "screened",
    clipped: float = CLIPPED,
    alike: float = ALIKE,
) -> Judgement:
    """Judge the contributions to one fragment.

    usual      the median reference of the run's last rounds; None in its first one
    plausible  a norm that no first round of one or two workers exceeds
    clipped    the longest honest contribution with the run's codec and data, as a multiple of the reference
    alike      the least agreement, as a share of the usual one: ALIKE if all workers train on the same data, 0 if not
    """
    copies = _copies(evidence) if rule in DIRECTIONS else {}
    if copies:
        own = {worker: each for worker, each in evidence.items() if worker not in copies}
        judgement = judge(own, usual, plausible, rule=rule, clipped=clipped, alike=alike)
        verdicts = judgement.verdicts | copies
        return replace(judgement, verdicts={worker: verdicts[worker] for worker in evidence})
    reference = _reference([each.measure.norm for each in evidence.values()], usual, plausible)
    if reference is None:
        return Judgement(None, {worker: Verdict(1.0) for worker in evidence})
    work = statistics.median(each.work for each in evidence.values())
    allowed = clipped * min(max((usual or 0.0) / reference, 1.0), clipped)
    verdicts = {worker: _by_norm(each, reference, work, allowed, alike) for worker, each in evidence.items()}
    if rule not in NORMS:
        verdicts = {worker: replace(each, factor=1.0, reason="") for worker, each in verdicts.items()}
    elif all(each.factor == 0 for each in verdicts.values()):
        verdicts = {worker: _shortened(each, evidence[worker], reference) for worker, each in verdicts.items()}
    judged, close = _by_direction(evidence, verdicts, work, alike, leave_out=rule in DIRECTIONS)
    return Judgement(reference, judged, close)


def _copies(evidence: Mapping[str, Evidence]) -> dict[str, Verdict]:
    """Return the verdicts on contributions that repeat another one, of a worker earlier in the order of names."""
    workers = sorted(worker for worker, each in evidence.items() if np.count_nonzero(each.measure.direction) >= FEW)
    products = _products(evidence, workers)
    found: dict[str, Verdict] = {}
    for k, worker in enumerate(workers):
        norm = evidence[worker].measure.norm
        for i in np.flatnonzero(products[k, :k] > COPIED):
            first = workers[i]
            if first not in found and math.isclose(norm, evidence[first].measure.norm, rel_tol=1 - COPIED):
                found[worker] = Verdict(0.0, f"it is what {first} has sent: the work of one counts once")
                break
    return found


def _reference(norms: list[float], usual: float | None, plausible: float) -> float | None:
    """Return the norm that all are compared with; None if none is above 0."""
    positive = sorted(norm for norm in norms if norm > 0)
    if not positive:
        return usual
    low, high = positive[(len(positive) - 1) // 2], positive[len(positive) // 2]
    found = math.sqrt(low * high) if low >= LAZY * high else low
    if len(positive) == 2 and found == low and high <= plausible:  # take the longer one for honest if it can be
        found = high
    if usual is not None:
        reach = REACH if len(norms) > 2 else REACH_OF_TWO
        return min(max(found, usual / reach), usual * reach)
    return min(found, plausible)


def _by_norm(each: Evidence, reference: float, work: float, clipped: float, alike: float) -> Verdict:
    """Judge a contribution by its norm. `work`: the round's median; `clipped`: the most that one of that much work may
    have, as a multiple of the reference."""
    norm = each.measure.norm
    share = each.work / work if work > 0 else 1.0
    ratio = norm / reference
    told = f"its norm is {norm:.3g}, {ratio:.3g} times the round's {reference:.3g}"
    if ratio > LEFT_OUT * max(1.0, share):
        return Verdict(0.0, f"{told}: more than {LEFT_OUT:g} times is no training", ratio)
    # Late work comes less the delta of its round, so nothing may remain of it.
    if norm < LAZY * min(1.0, share) * reference and not each.all_late:
        return Verdict(0.0, f"{told}: less than {LAZY:g} times brings next to nothing", ratio)
    usual = max(1.0, share)
    allowed = usual * (max(clipped, CLIPPED_UNEQUAL) if each.late or share > 1 else clipped)
    if alike == 0:
        allowed *= math.sqrt(1 + min(each.late, MOST_LATE))
    if ratio > allowed:
        length = allowed if each.late else usual
        return Verdict(length / ratio, f"{told}: shortened to {length:.3g} times", ratio)
    return Verdict(1.0, "", ratio)


def _shortened(verdict: Verdict, each: Evidence, reference: float) -> Verdict:
    """Return a verdict that leaves out nobody."""
    if each.measure.norm <= CLIPPED * reference:
        return replace(verdict, factor=1.0, reason="")
    return replace(verdict, factor=reference / each.measure.norm, reason=f"{verdict.reason}; shortened")


def _by_direction(
    evidence: Mapping[str, Evidence],
    verdicts: Mapping[str, Verdict],
    work: float,
    alike: float,
    *,
    leave_out: bool,
) -> tuple[dict[str, Verdict], dict[tuple[str, str], float]]:
    """Note each contribution's agreement with the others; leave out those with too little, one after the other. Return
    the verdicts, and the pairs that are close.

    A contribution of less work has a noisier direction, so less is asked of it: noise averages out with the square root
    of the steps. Late work comes less the mean that it missed, which all that missed it have in common: so everybody is
    compared with those that are in time, and nobody is left out who has not two of them to be compared with.
    """
    judged = dict(verdicts)
    staying = [worker for worker, verdict in judged.items() if verdict.factor > 0 and evidence[worker].measure.norm > 0]
    most_left_out = (len(staying) - 1) // 2 if leave_out else 0
    products = _products(evidence, staying)
    chance = CHANCE / math.sqrt(_dimensions(evidence, staying)) if staying else 0.0
    while len(staying) > 1:
        peers = [[j for j, one in enumerate(staying) if j != i and not evidence[one].late] for i in range(len(staying))]
        agreements = _agreements(products, peers)
        judged |= {
            worker: replace(judged[worker], cosine=cosine) for worker, cosine in zip(staying, agreements, strict=True)
        }
        usual = [max(_upper_median([agreements[j] for j in others] or [0.0]), 0.0) for others in peers]
        bounds = [
            _least_agreement(evidence[worker], judged[worker].ratio or 1.0, typical, work, chance, alike)
            if len(others) > 1
            else -math.inf
            for worker, typical, others in zip(staying, usual, peers, strict=True)
        ]
        worst = min(range(len(staying)), key=lambda i: agreements[i] - bounds[i])
        if most_left_out == 0 or agreements[worst] >= bounds[worst]:
            break
        what = "it opposes the others" if agreements[worst] < -chance else "its direction is not that of the others"
        reason = f"{what}: its median cosine with them is {agreements[worst]:.3f}, theirs is {usual[worst]:.3f}"
        judged[staying[worst]] = replace(judged[staying[worst]], factor=0.0, reason=reason)
        most_left_out -= 1
        del staying[worst]
        products = np.delete(np.delete(products, worst, 0), worst, 1)
    in_time = [i for i, worker in enumerate(staying) if not evidence[worker].late]
    return judged, _close([staying[i] for i in in_time], products[np.ix_(in_time, in_time)], chance)


def _close(workers: list[str], cosines: F64, chance: float) -> dict[tuple[str, str], float]:
    """Return the pairs of workers with less than CLOSE of the distance that is usual for two with their agreements.
    Among three workers, two that are close are what is usual; nor can it be said where all directions are nearly the
    same, as in a first round of few steps."""
    everybody = range(len(workers))
    peers = [[j for j in everybody if j != i] for i in everybody]
    agreements = np.array(_agreements(cosines, peers)) if len(workers) > 3 else np.zeros(0)
    usual = float(np.median(agreements)) if len(agreements) else 0.0
    if usual <= 2 * chance or agreements.min() <= 0:
        return {}
    expected = np.outer(agreements, agreements) / usual
    told = expected < 1 - 2 * chance
    distances = np.divide(1 - cosines, 1 - expected, out=np.ones_like(cosines), where=told)
    return {
        (workers[i], workers[j]): float(distances[i, j]) for i, j in np.argwhere(np.triu(distances < CLOSE, 1)).tolist()
    }


def _least_agreement(each: Evidence, ratio: float, usual: float, work: float, chance: float, alike: float) -> float:
    """Return the agreement below which a contribution is left out. Less is asked of one with less work, whose direction
    is noisier; of one with late work, whose own round's part alone agrees, by as much as that makes it longer; and of
    one that is late as a whole, which comes less the mean that it missed."""
    if alike == 0 or each.all_late:
        return -max(chance, OPPOSED * usual)
    share = math.sqrt(min(1.0, each.work / work)) if work > 0 else 1.0
    late = max(1.0, ratio) if each.late else 1.0
    return alike * share * usual / late - max(chance - usual / 2, 0.0)


def _products(evidence: Mapping[str, Evidence], workers: list[str]) -> F64:
    """Return the inner products of the directions, float64[workers, workers]."""
    if not workers:
        return np.zeros((0, 0))
    sketches = np.stack([evidence[worker].measure.direction for worker in workers]).astype(np.float32)
    return (sketches @ sketches.T).astype(np.float64)


def _dimensions(evidence: Mapping[str, Evidence], workers: list[str]) -> int:
    return len(evidence[workers[0]].measure.direction)


def _agreements(cosines: F64, peers: Sequence[Sequence[int]]) -> list[float]:
    """Return for each worker the median of its cosines with its peers or, if it has none, with all others. `cosines`:
    float64[workers, workers]."""
    others = [list(each) or [j for j in range(len(peers)) if j != i] for i, each in enumerate(peers)]
    return [_upper_median(row[own].tolist()) for row, own in zip(cosines, others, strict=True)]


def _upper_median(values: list[float]) -> float:
    """Return the median; of an even number of values the higher of the middle two. Among three workers, of which one is
    hostile, an honest one has one honest companion."""
    return sorted(values)[len(values) // 2]
