"""Whether a model looks spoilt, and who stands out among those who have made it so. Pure.

Contributions are judged one by one before they are averaged (`judging.py`). What gets through all the same, a bias
within the bounds or a majority that is wrong, shows in what comes of it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HARDLY = 0.25  # of the cosine that half of the others have
LESS = 0.5  # of it: no reason to leave somebody out, but to look at who it is once the loss falls no more
FLAT = 4  # states in a row without a new lowest loss
LEAST_ROUNDS = 2  # of one nobody can tell what is usual
BOUND = 65_504.0  # of any value of θ and u, after which a copy in fp16 is infinite


@dataclass(frozen=True)
class Rise:
    """A held-out loss that is too high: of state `round`, and of the one that was evaluated before it. State `good` was
    the last one before these that was not."""

    round: int
    loss: float
    good: int
    lowest: float


@dataclass(frozen=True)
class Part:
    """What one worker's contribution to one fragment counted: `factor` times its weight, with this cosine."""

    factor: float
    cosine: float | None


def risen(losses: Sequence[tuple[int, float]], most: float) -> Rise | None:
    """Return the rise by more than `most` above the lowest of all `losses`, (state, nats per token) in the order of the
    states; None unless the newest two have it: one may be a mistake of who has measured it."""
    if len(losses) < 3:
        return None
    lowest = min(loss for _, loss in losses)
    if not all(_is_above(loss, lowest + most) for _, loss in losses[-2:]):
        return None
    good = max(round_ for round_, loss in losses if not _is_above(loss, lowest + most))
    return Rise(*losses[-1], good, lowest)


def _is_above(loss: float, bound: float) -> bool:
    return not loss <= bound  # so is one that is no number


def stopped_falling(losses: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """Return the state with the lowest loss, and that loss, if none of the newest FLAT states is lower than all before.
    `losses`: (state, nats per token), oldest first. None also if they are too few."""
    before, newest = losses[:-FLAT], losses[-FLAT:]
    if not before:
        return None
    lowest = min(before, key=lambda each: each[1])
    return None if any(loss < lowest[1] for _, loss in newest) else lowest


def suspects(parts: Mapping[str, Sequence[Part]], share: float = HARDLY) -> list[str]:
    """Return the workers that stand out: those shortened or left out most of the time, and those whose cosine with the
    others was less than `share` of the usual one. Never half of those that took part, for then nobody stands out."""
    known = {worker: each for worker, each in parts.items() if len(each) >= LEAST_ROUNDS}
    cosines = {
        worker: statistics.fmean(part.cosine for part in each if part.cosine is not None)
        for worker, each in known.items()
        if any(part.cosine is not None for part in each)
    }
    found = {
        worker
        for worker, each in known.items()
        if 2 * sum(part.factor < 1 for part in each) > len(each) or _differs(cosines, worker, share)
    }
    return sorted(found) if 2 * len(found) < len(parts) else []


def _differs(cosines: Mapping[str, float], worker: str, share: float) -> bool:
    others = [cosine for other, cosine in cosines.items() if other != worker]
    if worker not in cosines or len(others) < 2:
        return False
    typical = statistics.median(others)
    return typical > 0 and cosines[worker] < share * typical
