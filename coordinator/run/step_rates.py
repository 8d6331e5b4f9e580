"""How many inner steps a worker does per round: H, or with `sync.inner_steps = "auto"` as many as it manages in the
round's time.

A worker reports its own rate, in inner steps per second. The rate determines how much of the training set the worker
gets and how much its contribution weighs. So the coordinator accepts a reported rate only as far as its own clock
supports it: the steps of a contribution, over the time from its assignment to the end of its first fragment's upload.
"""

import math
from collections.abc import Mapping
from statistics import median_low

from protocol.spec.sections import SyncSpec

# Largest believed ratio of a claim to the observed rate. The observed time also includes encoding and uploading.
MAX_CLAIM_RATIO = 2.0
MAX_TIME_RATIO = 2.0  # times `round_s`: a longer observed time counts as this long
INSTANT_S = 1e-3
MIN_KEPT = 0.5  # one slow round lowers an observed rate at most to this share, because it may be an outage


def inner_steps(sync: SyncSpec, steps_per_second: float, elapsed_s: float = 0.0) -> int:
    """Return H of one worker for a round that opened `elapsed_s` seconds ago.

    With `sync.inner_steps = "auto"`: the steps that a worker with this rate completes in the rest of `round_s`, within
    the spec's bounds. So fast, slow, late and restarted workers finish at about the same time, and the weighting by
    tokens accounts for the difference.
    """
    if sync.inner_steps != "auto":
        return sync.inner_steps
    assert sync.round_s is not None  # the spec requires it
    left_s = max(sync.round_s - elapsed_s, 0.0)
    wanted = min(steps_per_second * left_s, float(sync.max_inner_steps))
    return max(sync.min_inner_steps, round(wanted))


class StepRates:
    """The observed rates of one run's workers, in inner steps per second. Kept in memory only."""

    def __init__(self, sync: SyncSpec) -> None:
        self._round_s = math.inf if sync.round_s is None else sync.round_s
        self._nominal = sync.nominal_inner_steps / self._round_s
        self._shown: dict[str, float] = {}
        self._typical = self._nominal  # the lower median of the workers that took part in the last round

    def observe(self, seen: Mapping[str, tuple[int, float]], claims: Mapping[str, float | None]) -> None:
        """Record the rates observed in a round. `seen`: by worker, the steps of its contribution and the seconds from
        their assignment to its arrival (infinite if unknown). `claims`: the rates that the workers report."""
        for worker, (steps, seconds) in seen.items():
            shown = steps / min(max(seconds, INSTANT_S), MAX_TIME_RATIO * self._round_s)
            self._shown[worker] = max(shown, MIN_KEPT * self._shown.get(worker, 0.0))
        if seen:
            self._typical = median_low(self.believed(worker, claims.get(worker)) for worker in seen)

    def believed(self, worker: str, claim: float | None) -> float:
        """Return the rate that determines how many steps the worker is assigned. `claim`: the rate it reports; None if
        it has reported none.

        The result is the claim, but at most MAX_CLAIM_RATIO times the observed rate. A worker without an observed rate
        gets at most the median of the last round's workers or, in a run's first round, the nominal rate.
        """
        shown = self._shown.get(worker)
        most = self._typical if shown is None else MAX_CLAIM_RATIO * shown
        return min(self._nominal if claim is None or claim <= 0 else claim, most)
