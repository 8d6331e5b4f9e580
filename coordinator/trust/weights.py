"""What each contribution to a fragment weighs in its mean: the work that is in it, but nobody outweighs. Pure.

No contribution weighs more than one assigned round (`sync/admission.py`). Where each worker has an H of its own, one
that was assigned far more than the others would still be nearly all of the mean; and whoever answers at once has shown
the pace of a fast machine. So its weight ends at MOST times the median of the others'.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from protocol.spec.sections import SyncSpec

MOST = 4  # a contribution of three is at most two thirds of the mean, of nine a third
FEW = 2  # of two nobody can say which one is usual


def weights(tokens: Mapping[str, int], sync: SyncSpec) -> dict[str, int]:
    """Return the weight of each worker's contribution, in tokens, of which it has so many."""
    if sync.inner_steps != "auto" or len(tokens) <= FEW:
        return dict(tokens)
    ascending = sorted(tokens.values())
    return {worker: min(own, _most(ascending, own)) for worker, own in tokens.items()}


def _most(ascending: Sequence[int], own: int) -> int:
    """Return MOST times the median of all of `ascending` but `own`; of whole work units, as these are."""
    place, others = bisect_left(ascending, own), len(ascending) - 1
    low, high = (each + (each >= place) for each in ((others - 1) // 2, others // 2))
    return MOST * (ascending[low] + ascending[high]) // 2
