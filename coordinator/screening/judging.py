"""What each contribution to a fragment may count: nothing, a part, or all of its weight. Pure.

Honest pseudo-gradients differ: by the work that is in them, by their data, by the hardware. What they have in common is
a norm of the same order and a direction that does not oppose the others'. So

- a norm is compared with the **reference**: the median of the round's, kept within reach of what was usual in the run's
  last rounds. What is longer than CLIPPED times that is shortened to it, as by Karimireddy, He, Jaggi 2021 (centred
  clipping); more than LEFT_OUT times is no training and is left out, and so is less than LAZY;
- a **direction** is compared with the weighted sum of all others. Who opposes it, by more than chance and clearly, is
  left out: the one that opposes it most, then the rest is looked at again, for two that collude hide each other. A
  majority always stays.

- who sends what another one has sent, but for rounding, brings no work of its own: one of them counts.

Where everybody would be left out nobody is, but all are shortened: a round always has its delta. Of two that oppose
each other nobody can say who is right.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from coordinator.screening.measuring import Measure

CLIPPED = 2.0  # times the reference
CLIPPED_WITH_FEEDBACK = 3.0  # what a codec left out in earlier rounds is in the next ones; of newcomers nothing yet
MOST_ALLOWED = 3.0  # times the reference, to a worker whose norms are always so long
MOST_CARRIED = 2  # rounds of late work, each of which may add another reference: its own norm and that of its delta
LEFT_OUT = 10.0
LAZY = 0.1
REACH, REACH_OF_TWO = 20.0, 5.0  # of the reference, from what is usual; the latter with one or two workers
CHANCE = 4.0  # standard deviations of a sketch
CHANCE_OF_NOISE = 6.0  # where each worker adds noise that drowns its direction: then all cosines are chance
CLEARLY = 0.25  # of the cosine that half of the others have
FEW = 64  # values other than 0: that so few are the same may be
COPIED = 0.9999  # the cosine of two sketches above which, with norms as near, one is a copy; fp16 keeps three digits


@dataclass(frozen=True)
class Evidence:
    """What is known of one contribution.

    weight  its share of the round, before it is judged
    work    the work units that are in it, with those that it carries over
    carried  from how many earlier rounds
    worked  where work is carried, its norm without the deltas that it comes less; infinite where nobody knows
    usual   the median of its worker's norms in earlier rounds, as multiples of their references; None without any
    """

    measure: Measure
    weight: float
    work: float
    carried: int = 0
    usual: float | None = None
    worked: float = math.inf


@dataclass(frozen=True)
class Verdict:
    """Of one contribution: its weight counts `factor` times, 0 where it is left out, with the reason; `ratio` is its
    norm as a multiple of the reference, `cosine` that of it and all others that stay, where there are any."""

    factor: float
    reason: str = ""
    ratio: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The verdicts by worker, and the reference, by which later rounds know what is usual; None where all are zero."""

    reference: float | None
    verdicts: dict[str, Verdict]


# What each rule of aggregation (`sync.aggregation`) looks at; all others tell, and leave out nobody.
NORMS, DIRECTIONS = frozenset({"screened", "clipped"}), frozenset({"screened"})


def judge(
    evidence: Mapping[str, Evidence],
    usual: float | None = None,
    plausible: float = math.inf,
    *,
    rule: str = "screened",
    clipped: float = CLIPPED,
    chance: float = CHANCE,
) -> Judgement:
    """Judge the contributions to one fragment.

    usual      the median reference of the run's last rounds; None in its first one
    plausible  a norm beyond which no first round of one or two workers goes
    clipped    how many times as long as the reference an honest contribution with the run's codec may be
    chance     standard deviations of a sketch up to which a cosine may be chance
    """
    copies = _copies(evidence) if rule in DIRECTIONS else {}
    if copies:
        own = {worker: each for worker, each in evidence.items() if worker not in copies}
        judgement = judge(own, usual, plausible, rule=rule, clipped=clipped, chance=chance)
        verdicts = judgement.verdicts | copies
        return replace(judgement, verdicts={worker: verdicts[worker] for worker in evidence})
    reference = _reference([each.measure.norm for each in evidence.values()], usual, plausible)
    if reference is None:
        return Judgement(None, {worker: Verdict(1.0) for worker in evidence})
    work = statistics.median(each.work for each in evidence.values())
    room = clipped * min(max((usual or 0.0) / reference, 1.0), CLIPPED)
    verdicts = {worker: _by_norm(each, reference, work, room) for worker, each in evidence.items()}
    if rule not in NORMS:
        verdicts = {worker: replace(each, factor=1.0, reason="") for worker, each in verdicts.items()}
    elif all(each.factor == 0 for each in verdicts.values()):
        verdicts = {worker: _shortened(each, evidence[worker], reference) for worker, each in verdicts.items()}
    return Judgement(reference, _by_direction(evidence, verdicts, chance, leave_out=rule in DIRECTIONS))


def _copies(evidence: Mapping[str, Evidence]) -> dict[str, Verdict]:
    """Return the verdicts on those that have sent what somebody before them in the order of names has."""
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
    """Return the norm with which all are compared; None where none is above 0."""
    positive = sorted(norm for norm in norms if norm > 0)
    if not positive:
        return usual
    low, high = positive[(len(positive) - 1) // 2], positive[len(positive) // 2]
    found = math.sqrt(low * high) if low >= LAZY * high else low
    if len(positive) == 2 and found == low and high <= plausible:  # the longer one is honest, unless that cannot be
        found = high
    if usual is not None:
        reach = REACH if len(norms) > 2 else REACH_OF_TWO
        return min(max(found, usual / reach), usual * reach)
    return min(found, plausible)


def _by_norm(each: Evidence, reference: float, work: float, room: float) -> Verdict:
    """`room`: how many times as long a norm may be; where norms were longer before, more: among newcomers the others
    are no longer than ever."""
    norm, share = each.measure.norm, each.work / work if work > 0 else 1.0
    ratio = norm / reference
    told = f"its norm is {norm:.3g}, {ratio:.3g} times the round's {reference:.3g}"
    if ratio > LEFT_OUT * max(1.0, share):
        return Verdict(0.0, f"{told}: more than {LEFT_OUT:g} times is no training", ratio)
    # Late work comes less what the others have done meanwhile, of which there may be nothing left to do.
    if (each.worked if each.carried else norm) < LAZY * min(1.0, share) * reference:
        return Verdict(0.0, f"{told}: less than {LAZY:g} times brings next to nothing", ratio)
    longer, late = max(room, min(each.usual or 0.0, MOST_ALLOWED)), min(each.carried, MOST_CARRIED)
    if ratio > longer * max(1.0, share) + late:
        length = max(1.0, share) + late
        return Verdict(length / ratio, f"{told}: shortened to {length:.3g} times", ratio)
    return Verdict(1.0, "", ratio)


def _shortened(verdict: Verdict, each: Evidence, reference: float) -> Verdict:
    """Return a verdict that leaves out nobody."""
    if each.measure.norm <= CLIPPED * reference:
        return replace(verdict, factor=1.0, reason="")
    return replace(verdict, factor=reference / each.measure.norm, reason=f"{verdict.reason}; shortened")


def _by_direction(
    evidence: Mapping[str, Evidence], verdicts: Mapping[str, Verdict], deviations: float, *, leave_out: bool
) -> dict[str, Verdict]:
    """Tell each one's cosine with all others; leave out who opposes them, one after the other."""
    judged = dict(verdicts)
    staying = [worker for worker, verdict in judged.items() if verdict.factor > 0 and evidence[worker].measure.norm > 0]
    most_left_out = (len(staying) - 1) // 2 if leave_out else 0
    products, weights = _products(evidence, staying), _lengths(evidence, judged, staying)
    chance = deviations / math.sqrt(_dimensions(evidence, staying)) if staying else 0.0
    while len(staying) > 1:
        cosines = _with_the_others(products, weights)
        judged |= {
            worker: replace(judged[worker], cosine=cosine) for worker, cosine in zip(staying, cosines, strict=True)
        }
        worst = min(range(len(staying)), key=cosines.__getitem__)
        typical = statistics.median(cosines[:worst] + cosines[worst + 1 :])
        bound = -max(chance, CLEARLY * max(typical, 0.0))
        if most_left_out == 0 or cosines[worst] >= bound:
            break
        reason = f"it opposes the others: its cosine with them is {cosines[worst]:.3f}, half of them have {typical:.3f}"
        judged[staying[worst]] = replace(judged[staying[worst]], factor=0.0, reason=reason)
        most_left_out -= 1
        del staying[worst]
        products = np.delete(np.delete(products, worst, 0), worst, 1)
        weights = np.delete(weights, worst)
    return judged


def _products(
    evidence: Mapping[str, Evidence], workers: list[str]
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the inner products of the directions, float64[workers, workers]."""
    if not workers:
        return np.zeros((0, 0))
    sketches = np.stack([evidence[worker].measure.direction for worker in workers]).astype(np.float32)
    return (sketches @ sketches.T).astype(np.float64)


def _lengths(
    evidence: Mapping[str, Evidence], verdicts: Mapping[str, Verdict], workers: list[str]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return how long each one's part of the sum is, float64[workers]."""
    parts = [evidence[each].weight * verdicts[each].factor * evidence[each].measure.norm for each in workers]
    return np.array(parts, np.float64)


def _dimensions(evidence: Mapping[str, Evidence], workers: list[str]) -> int:
    return len(evidence[workers[0]].measure.direction)


def _with_the_others(
    products: np.ndarray[tuple[int, int], np.dtype[np.float64]], lengths: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> list[float]:
    """Return each one's cosine with the weighted sum of all others."""
    with_all = products @ lengths
    of_all = float(lengths @ with_all)
    own = np.diagonal(products)
    inner = with_all - lengths * own
    # |sum of the others|² = |sum|² − 2 a (with all) + a² (own)
    squared = of_all - 2 * lengths * with_all + lengths**2 * own
    scale = np.sqrt(np.maximum(squared, 0.0) * own)
    return [float(each) for each in np.divide(inner, scale, out=np.zeros_like(inner), where=scale > 0)]
