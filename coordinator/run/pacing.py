"""How many inner steps a worker does per round: H, or as many as it manages in the round's time.

What a worker says of its pace is its own word, and decides how much of the training set it gets and what it weighs. So
it is believed only as far as the coordinator has seen it, by its own clock: the steps of a contribution, over the time
from its assignment to the end of its first fragment's upload.
"""

import math
from collections.abc import Mapping
from statistics import median_low

from protocol.spec.sections import SyncSpec

HIDDEN = 2.0  # times what was seen: in that time the worker has also encoded, waited and uploaded
LONGEST = 2.0  # times `round_s`, beyond which a round is no slower: so nobody gets less than it has just done
INSTANT_S = 1e-3
LASTING = 0.5  # of what was seen before holds, however the next round goes: an outage is no change of pace


def inner_steps(sync: SyncSpec, steps_per_second: float, elapsed_s: float = 0.0) -> int:
    """Return H of one worker for a round that opened `elapsed_s` seconds ago.

    With `sync.inner_steps = "auto"`: as many as a worker of that pace does in the rest of `round_s`, within the bounds;
    so fast and slow workers, and those that came late or were restarted, finish at about the same time, and the
    weighting by tokens does the rest.
    """
    if sync.inner_steps != "auto":
        return sync.inner_steps
    assert sync.round_s is not None  # the spec demands it
    left_s = max(sync.round_s - elapsed_s, 0.0)
    wanted = min(steps_per_second * left_s, float(sync.max_inner_steps))
    return max(sync.min_inner_steps, round(wanted))


class Paces:
    """What the workers of one run have shown, in inner steps per second. Nothing of it is durable."""

    def __init__(self, sync: SyncSpec) -> None:
        self._round_s = math.inf if sync.round_s is None else sync.round_s
        self._nominal = sync.nominal_inner_steps / self._round_s
        self._shown: dict[str, float] = {}
        self._typical = self._nominal  # of half of those that took part in the last round

    def see(self, seen: Mapping[str, tuple[int, float]], claims: Mapping[str, float | None]) -> None:
        """Note what a round has shown: the steps of each worker's contribution, and how many seconds after they had
        been assigned it was there (infinite: not known). `claims`: what the workers say of their pace."""
        for worker, (steps, seconds) in seen.items():
            shown = steps / min(max(seconds, INSTANT_S), LONGEST * self._round_s)
            self._shown[worker] = max(shown, LASTING * self._shown.get(worker, 0.0))
        if seen:
            self._typical = median_low(self.believed(worker, claims.get(worker)) for worker in seen)

    def believed(self, worker: str, claim: float | None) -> float:
        """Return the pace by which `worker` is assigned its steps, which says `claim` of itself (None: nothing yet).

        That is what it says, but no more than HIDDEN times what it has shown. Who has shown nothing yet gets no more
        than half of those that took part in the last round, or in a run's first round, no more than the nominal pace.
        """
        shown = self._shown.get(worker)
        most = self._typical if shown is None else HIDDEN * shown
        return min(self._nominal if claim is None or claim <= 0 else claim, most)
