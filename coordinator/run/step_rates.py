"""How many inner steps a worker does per round: as many as it manages while the fastest worker does H. With
`sync.wait = "always"` all workers do H.

A worker reports its own rate, in inner steps per second. The rates determine how much of the training set each worker
gets, how much its contribution weighs, and how long a round is. So the coordinator accepts a reported rate only as far
as its own clock supports it: the steps of a contribution, over the time from its assignment to the end of its first
fragment's upload. A worker without an observed rate does a short round first.
"""

from collections.abc import Mapping

# Largest believed ratio of a claim to the observed rate. The observed time also includes encoding and uploading, which
# take longer than the few steps of a first round if the line is slow: then the claim may be MAX_LEAD times the rate.
MAX_CLAIM_RATIO = 2.0
# With three tokens or more, no rate counts as more than this many times the fastest of the other tokens. Otherwise one
# that uploads at once, without training, would leave a single step to the others.
MAX_LEAD = 8.0
INSTANT_S = 1e-3
MIN_KEPT = 0.5  # one slow round lowers an observed rate at most to this share, because it may be an outage
FIRST_SHARE = 10  # a worker of unknown rate does H divided by this


def first_steps(h: int) -> int:
    """Return the inner steps of a worker of unknown rate."""
    return max(h // FIRST_SHARE, 1)


def inner_steps(h: int, rate: float, fastest: float, elapsed_s: float = 0.0) -> int:
    """Return how many inner steps a worker with this `rate` completes while the `fastest` does h, in a round that
    began `elapsed_s` seconds ago: at least 1, at most h. Rates are in steps per second.

    So fast, slow, late and restarted workers finish at about the same time, and the weighting by tokens accounts for
    the difference.
    """
    left_s = max(h / fastest - elapsed_s, 0.0)
    return max(round(min(rate * left_s, h)), 1)


def fastest(rates: Mapping[str, float], owners: Mapping[str, str]) -> float:
    """Return the rate of the fastest worker, as far as it is credible. `rates`: by worker, at least one. `owners`: the
    token of each worker, if it is known."""
    by_token: dict[str, float] = {}
    for worker, rate in rates.items():
        token = owners.get(worker, worker)
        by_token[token] = max(by_token.get(token, 0.0), rate)
    in_order = sorted(by_token.values(), reverse=True)
    return in_order[0] if len(in_order) < 3 else min(in_order[0], MAX_LEAD * in_order[1])


class StepRates:
    """The observed rates of one run's workers, in inner steps per second. Kept in memory only."""

    def __init__(self) -> None:
        self._shown: dict[str, float] = {}
        self._first: set[str] = set()  # workers with only one observed round

    def observe(self, seen: Mapping[str, tuple[int, float]]) -> None:
        """Record the rates observed in a round. `seen`: by worker, the steps of its contribution and the seconds from
        their assignment to its arrival."""
        self._first = (self._first - seen.keys()) | (seen.keys() - self._shown.keys())
        for worker, (steps, seconds) in seen.items():
            shown = steps / max(seconds, INSTANT_S)
            self._shown[worker] = max(shown, MIN_KEPT * self._shown.get(worker, 0.0))

    def believed(self, worker: str, claim: float | None) -> float | None:
        """Return the rate that determines how many steps the worker is assigned; None if it has none, since it has not
        contributed yet. `claim`: the rate that it reports; None if it has reported none.

        The result is the claim, but at most MAX_CLAIM_RATIO times the observed rate; after its first round, MAX_LEAD
        times.
        """
        shown = self._shown.get(worker)
        if not shown:
            return None
        ratio = MAX_LEAD if worker in self._first else MAX_CLAIM_RATIO
        return shown if claim is None or claim <= 0 else min(claim, ratio * shown)
