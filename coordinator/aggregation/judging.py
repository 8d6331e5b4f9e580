"""How much each contribution to a fragment counts: nothing, part of its weight, or all of it. Pure.

Honest pseudo-gradients differ in the work behind them, in their data and in the hardware, but their norms are of the
same order and they share a direction. All evidence is measured by the coordinator or taken from its own record; nothing
depends on what a contributor reports.

- **Norm.** Each norm is compared with the **reference**: the round's median, within bounds around the median reference
  of the run's last rounds. A norm above CLIPPED times the reference is shortened to the reference, as in centred
  clipping (Karimireddy, He, Jaggi 2021). Contributions above LEFT_OUT times or below LAZY times are left out. Work of
  missed rounds, according to the record, allows a norm of CLIPPED_UNEQUAL times, however many rounds were missed.
- **Direction.** A worker's *agreement* is the median of its cosines with each other contribution, so a minority that
  colludes cannot raise its own. If all workers train on the same data, their agreements are similar; a contribution
  with less than LEAST_AGREEMENT of the usual agreement is left out, the worst one first. That includes noise, and a
  gradient with every second sign flipped: both have an agreement of about 0. Where honest agreements differ by that
  much, only contributions that clearly oppose the others are left out. So it is if data differs by worker. Late work
  has the means of its missed rounds subtracted, so it may oppose each worker in those means by that worker's share. A
  majority always stays.
- **Copies.** If several contributions are the same except for rounding, one of them counts.

If every contribution would be left out, all are shortened instead, because a round always has a delta. If two workers
oppose each other, the coordinator cannot decide which one is right.

`SimilarityHistory` follows pairs of workers over the rounds, to report those that train on the same data.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from coordinator.aggregation.measuring import Measure

CLIPPED = 1.25  # times the reference; equal work on the same data gives norms within 1.2
CLIPPED_UNEQUAL = 1.5  # if a worker did more steps than the others, or late work; relative to that amount of work
# If each worker has its own data. Late work is allowed √(1 + rounds, at most MOST_LATE) times as much.
CLIPPED_OF_OTHER_DATA = 2.0
MOST_LATE = 3
CLIPPED_WITH_FEEDBACK = 1.5  # error feedback adds what the codec left out before; newcomers have no such residual yet
LEFT_OUT = 10.0
LAZY = 0.1
REACH, REACH_OF_TWO = 20.0, 5.0  # bounds of the reference, as a factor of the usual one; REACH_OF_TWO: up to 2 workers
CHANCE = 4.0  # standard deviations of a cosine between sketches that count as chance
LEAST_AGREEMENT = 0.25  # share of the usual agreement, for workers that train on the same data
SPREAD = 0.1  # by how much an honest agreement may fall short of the usual one, as long as the usual spread is unknown
MEASURED = 4  # contributions that show a spread: of three, two always agree equally
OUTLIER = 20.0  # spreads by which an honest agreement may fall short; 14 times the usual spread was measured
FARTHEST = 0.25  # by how much it may fall short at most, if the bound is not below 0; 0.21 was measured
OPPOSED = 0.25  # share of the usual agreement, negated, for workers whose data differs
OPPOSED_IN_NOISE = 0.75  # the same, where a fragment's honest agreements differ by as much as the usual one
CLOSE = 0.9  # share of the usual distance between two directions; honest pairs measured 0.88 to 1.1
FEW = 64  # non-zero values; sketches with fewer may be equal by chance
MEMORY = 0.8  # weight of the earlier score in SimilarityHistory, per fragment; the rest is the newest distance
SAME = 0.8  # a pair with a lower score sends nearly the same
COPIED = 0.9999  # cosine of two sketches, and ratio of their norms, that make one a copy; fp16 keeps three digits

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """What the coordinator knows about one contribution.

    weight    its share of the round's weight, before it is judged
    work      the work units in it, as the coordinator's record allows: more than it weighs if it was trained on an
              old state
    late      the number of missed rounds whose work may be in it, according to the coordinator's record
    missed    the largest share that one worker has in the mean of a missed round, added up over those rounds
    all_late  True if it contains no work of its own round
    """

    measure: Measure
    weight: float
    work: float
    late: int = 0
    missed: float = 0.0
    all_late: bool = False


@dataclass(frozen=True)
class Verdict:
    """The verdict on one contribution. `factor`: multiplies its weight; 0 if it is left out. `reason`: why the factor
    is not 1. `ratio`: its norm as a multiple of the reference. `cosine`: its agreement, the median of its cosines with
    each of the other contributions that are not left out; None if there are none."""

    factor: float
    reason: str = ""
    ratio: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The verdicts by worker, and the reference that later rounds compare theirs with; None if all norms are zero, or
    nobody was in time: of late work, less the mean that it missed, little may remain, so it is no measure of others.
    `close`: pairs of workers whose directions are closer than their agreement with the others explains, with their
    distance as a share of the usual one: 0 for the same direction, 1 for the usual distance."""

    reference: float | None
    verdicts: dict[str, Verdict]
    close: dict[tuple[str, str], float] = field(default_factory=dict)


def spread(cosines: Iterable[float | None]) -> float | None:
    """Return how much the agreements of one fragment's contributions differ: the median distance from their median,
    which a minority cannot move far. None for fewer than MEASURED. `cosines`: as verdicts have them."""
    agreements = [each for each in cosines if each is not None]
    if len(agreements) < MEASURED:
        return None
    usual = _upper_median(agreements)
    return _upper_median([abs(each - usual) for each in agreements])


# The values of `sync.aggregation` with which norms and directions change a factor. With "mean" they are only reported.
NORMS, DIRECTIONS = frozenset({"screened", "clipped"}), frozenset({"screened"})


def judge(
    evidence: Mapping[str, Evidence],
    usual: float | None = None,
    plausible: float = math.inf,
    *,
    rule: str = "screened",
    clipped: float = CLIPPED,
    least_agreement: float = LEAST_AGREEMENT,
    usual_spread: float | None = None,
) -> Judgement:
    """Judge the contributions to one fragment.

    usual            the median reference of the run's last rounds; None in its first one
    plausible        a norm that no honest first round of one or two workers exceeds
    clipped          the longest honest contribution with the run's codec and data, as a multiple of the reference
    least_agreement  share of the usual agreement: LEAST_AGREEMENT if all workers train on the same data, 0 if not
    usual_spread     the median `spread` of the fragment's last rounds; None if it is unknown
    """
    copies = _copies(evidence) if rule in DIRECTIONS else {}
    if copies:
        own = {worker: each for worker, each in evidence.items() if worker not in copies}
        judgement = judge(
            *(own, usual, plausible),
            rule=rule,
            clipped=clipped,
            least_agreement=least_agreement,
            usual_spread=usual_spread,
        )
        verdicts = judgement.verdicts | copies
        return replace(judgement, verdicts={worker: verdicts[worker] for worker in evidence})
    reference = _reference([each.measure.norm for each in evidence.values()], usual, plausible)
    if reference is None:
        return Judgement(None, {worker: Verdict(1.0) for worker in evidence})
    in_time = [each.measure.norm for each in evidence.values() if not each.late]
    least = reference  # what is too short is compared with this
    if usual is not None and 0 < len(in_time) < len(evidence):
        timely = _reference(in_time, usual, plausible) or reference
        reference, least = max(reference, min(timely, usual)), min(reference, timely)
    work = statistics.median(each.work for each in evidence.values())
    allowed = clipped * min(max((usual or 0.0) / reference, 1.0), clipped)
    verdicts = {
        worker: _by_norm(each, reference, least, work, allowed, least_agreement) for worker, each in evidence.items()
    }
    if rule not in NORMS:
        verdicts = {worker: replace(each, factor=1.0, reason="") for worker, each in verdicts.items()}
    elif all(each.factor == 0 for each in verdicts.values()):
        verdicts = {worker: _shortened(each, evidence[worker], reference) for worker, each in verdicts.items()}
    judged, close = _by_direction(
        *(evidence, verdicts, work, least_agreement, usual_spread), leave_out=rule in DIRECTIONS
    )
    return Judgement(reference if in_time else None, judged, close)


def _copies(evidence: Mapping[str, Evidence]) -> dict[str, Verdict]:
    """Return the verdicts on copies. The first worker by name counts, the others repeat its contribution."""
    workers = sorted(worker for worker, each in evidence.items() if np.count_nonzero(each.measure.direction) >= FEW)
    products = _products(evidence, workers)
    found: dict[str, Verdict] = {}
    for k, worker in enumerate(workers):
        norm = evidence[worker].measure.norm
        for i in np.flatnonzero(products[k, :k] > COPIED):
            first = workers[i]
            if first not in found and math.isclose(norm, evidence[first].measure.norm, rel_tol=1 - COPIED):
                found[worker] = Verdict(0.0, f"it repeats the contribution of {first}, so it does not count again")
                break
    return found


def _reference(norms: list[float], usual: float | None, plausible: float) -> float | None:
    """Return the norm that all norms are compared with; None if none is above 0."""
    positive = sorted(norm for norm in norms if norm > 0)
    if not positive:
        return usual
    low, high = positive[(len(positive) - 1) // 2], positive[len(positive) // 2]
    found = math.sqrt(low * high) if low >= LAZY * high else low
    if len(positive) == 2 and found == low and high <= plausible:  # assume that the longer one is honest
        found = high
    if usual is not None:
        reach = REACH if len(norms) > 2 else REACH_OF_TWO
        return min(max(found, usual / reach), usual * reach)
    return min(found, plausible)


def _by_norm(
    each: Evidence, reference: float, least: float, work: float, clipped: float, least_agreement: float
) -> Verdict:
    """Judge a contribution by its norm. `least`: the reference without late work, if that is smaller. `work`: the
    round's median, in work units. `clipped`: the largest honest norm for that work, in references."""
    norm = each.measure.norm
    share = each.work / work if work > 0 else 1.0
    ratio = norm / reference
    compared = f"its norm is {norm:.3g}, {ratio:.3g} times the round's {reference:.3g}"
    if ratio > LEFT_OUT * max(1.0, share):
        return Verdict(0.0, f"{compared}: more than {LEFT_OUT:g} times is not plausible for training", ratio)
    # The delta of the missed round is subtracted from late work, so its norm may be near 0.
    if norm < LAZY * min(1.0, share) * least and not each.all_late:
        return Verdict(0.0, f"{compared}: less than {LAZY:g} times contains almost no work", ratio)
    usual = max(1.0, share)
    allowed = usual * (max(clipped, CLIPPED_UNEQUAL) if each.late or share > 1 else clipped)
    if least_agreement == 0:
        allowed *= math.sqrt(1 + min(each.late, MOST_LATE))
    if ratio > allowed:
        length = allowed if each.late else usual
        return Verdict(length / ratio, f"{compared}: shortened to {length:.3g} times", ratio)
    return Verdict(1.0, "", ratio)


def _shortened(verdict: Verdict, each: Evidence, reference: float) -> Verdict:
    """Return the verdict of a contribution if all contributions of its round would be left out: it is shortened
    instead."""
    if each.measure.norm <= CLIPPED * reference:
        return replace(verdict, factor=1.0, reason="")
    return replace(verdict, factor=reference / each.measure.norm, reason=f"{verdict.reason}; shortened")


def _by_direction(
    evidence: Mapping[str, Evidence],
    verdicts: Mapping[str, Verdict],
    work: float,
    least_agreement: float,
    usual_spread: float | None,
    *,
    leave_out: bool,
) -> tuple[dict[str, Verdict], dict[tuple[str, str], float]]:
    """Set each contribution's agreement with the others, and leave out those with too little, one after the other.
    Return the verdicts, and the pairs that are close.

    Less agreement is required of less work, because noise averages out with the square root of the steps. Late work has
    the mean of its missed round subtracted, and all late contributions have that part in common. So contributions are
    compared only with those that are in time, and one is left out only if at least two others are in time.
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
        spread_now = OUTLIER * (spread(agreements) or 0.0)
        reach = min(max(spread_now, SPREAD if usual_spread is None else OUTLIER * usual_spread), FARTHEST)
        bounds = [
            _least_agreement(
                evidence[worker], judged[worker].ratio or 1.0, typical, work, chance, reach, least_agreement
            )
            if len(others) > 1
            else -math.inf
            for worker, typical, others in zip(staying, usual, peers, strict=True)
        ]
        worst = min(range(len(staying)), key=lambda i: agreements[i] - bounds[i])
        if most_left_out == 0 or agreements[worst] >= bounds[worst]:
            break
        what = "it opposes the others" if agreements[worst] < -chance else "its direction differs from the others'"
        reason = f"{what}: its median cosine with them is {agreements[worst]:.3f}, theirs is {usual[worst]:.3f}"
        judged[staying[worst]] = replace(judged[staying[worst]], factor=0.0, reason=reason)
        most_left_out -= 1
        del staying[worst]
        products = np.delete(np.delete(products, worst, 0), worst, 1)
    in_time = [i for i, worker in enumerate(staying) if not evidence[worker].late]
    return judged, _close([staying[i] for i in in_time], products[np.ix_(in_time, in_time)], chance)


def _close(workers: list[str], cosines: F64, chance: float) -> dict[tuple[str, str], float]:
    """Return the pairs of workers closer than CLOSE times the distance that is usual for their agreements, with that
    share.

    The result is empty with three workers or fewer, because two of three are often close. It is also empty if all
    directions are nearly the same, as in a first round of few steps.
    """
    everybody = range(len(workers))
    peers = [[j for j in everybody if j != i] for i in everybody]
    agreements = np.array(_agreements(cosines, peers)) if len(workers) > 3 else np.zeros(0)
    usual = float(np.median(agreements)) if len(agreements) else 0.0
    if usual <= 2 * chance or agreements.min() <= 0:
        return {}
    expected = np.outer(agreements, agreements) / usual
    significant = expected < 1 - 2 * chance
    distances = np.divide(1 - cosines, 1 - expected, out=np.ones_like(cosines), where=significant)
    return {
        (workers[i], workers[j]): float(distances[i, j]) for i, j in np.argwhere(np.triu(distances < CLOSE, 1)).tolist()
    }


def _least_agreement(
    each: Evidence, ratio: float, usual: float, work: float, chance: float, reach: float, least: float
) -> float:
    """Return the agreement below which a contribution is left out. `reach`: how far honest agreements may fall short of
    the usual one in this fragment. `least`: as a share of the usual one.

    The bound is also `reach` below the usual agreement or, if that is below 0, where opposition begins. Late in
    training, when rates are small, noise is most of every pseudo-gradient. Where noise is spread over all parameters,
    honest agreements are nearly equal, and what is only noise stands out: 0.07 to 0.12 were measured with a spread of
    0.002. Where few rows have most of the noise, as in embeddings, they are not: 0.18 to 0.22 were usual, with a spread
    of 0.015, and some of 0.08, -0.02 and -0.05 were honest. A contribution that is only noise adds no more of it there
    than an honest one.

    Less is required of three kinds of work. Little work has a noisier direction. In partly late work only the part of
    its own round agrees, so the requirement falls in proportion to the extra length. Entirely late work has the mean of
    its missed round subtracted, so it is left out only if it opposes the others.

    If data differs by worker, or nobody's directions have anything in common, late work may share nothing with another
    worker except the subtracted means. It then opposes a worker that repeats its data, or sends what a codec left out
    of the missed rounds, by that worker's share of the means.
    """
    if least == 0 or each.all_late:
        in_common = least > 0 and usual >= chance
        return -max(chance, OPPOSED * usual) - (0.0 if in_common else each.missed / ratio)
    share = math.sqrt(min(1.0, each.work / work)) if work > 0 else 1.0
    late = max(1.0, ratio) if each.late else 1.0
    bound = least * share * usual / late - max(chance - usual / 2, 0.0)
    expected = usual - reach  # if it is below 0, honest work may agree less than noise does
    return min(bound, expected if expected >= 0 else -max(chance, OPPOSED_IN_NOISE * usual))


def _products(evidence: Mapping[str, Evidence], workers: list[str]) -> F64:
    """Return the inner products of the directions, float64[workers, workers]."""
    if not workers:
        return np.zeros((0, 0))
    sketches = np.stack([evidence[worker].measure.direction for worker in workers]).astype(np.float32)
    return (sketches @ sketches.T).astype(np.float64)


def _dimensions(evidence: Mapping[str, Evidence], workers: list[str]) -> int:
    return len(evidence[workers[0]].measure.direction)


def _agreements(cosines: F64, peers: Sequence[Sequence[int]]) -> list[float]:
    """Return for each worker the median of its cosines with its peers or, if it has no peers, with all others.
    `cosines`: float64[workers, workers]."""
    others = [list(each) or [j for j in range(len(peers)) if j != i] for i, each in enumerate(peers)]
    return [_upper_median(row[own].tolist()) for row, own in zip(cosines, others, strict=True)]


def _upper_median(values: Sequence[float]) -> float:
    """Return the median; of an even number of values, the higher of the middle two. With three workers, one of them
    hostile, an honest worker has only one honest peer."""
    return sorted(values)[len(values) // 2]


class SimilarityHistory:
    """How close the directions of pairs of workers were in the last rounds, to find two workers that train on the same
    data.

    Dropout, another precision or another GPU change every value a little, so the losses and norms of two such workers
    differ. But their directions stay closer to each other than to any other worker's, round after round. Measured
    shares of the usual distance: 0.06 to 0.3 with another dropout seed, 0.4 to 0.9 with bf16 and fp32, 0.88 to 1.1 with
    separate data. Kept in memory only: after a restart, a few rounds are enough to rebuild it.
    """

    def __init__(self) -> None:
        self._scores: dict[tuple[str, str], float] = {}

    def update(self, distances: Mapping[tuple[str, str], float], present: Collection[str]) -> list[tuple[str, str]]:
        """Add one fragment's distances. `distances`: of pairs among the workers `present`, as shares of the usual
        distance; 1 for pairs that are not listed. Return the pairs that send nearly the same, in order."""
        for pair in {*distances, *(pair for pair in self._scores if set(pair) <= set(present))}:
            score = MEMORY * self._scores.get(pair, 1.0) + (1 - MEMORY) * distances.get(pair, 1.0)
            self._scores[pair] = score
            if score > 0.99:
                del self._scores[pair]
        return sorted(pair for pair in distances if self._scores.get(pair, 1.0) < SAME)
