"""When a round closes: the pure state machine of one (round, fragment).

Everything that decides about a fragment's state is in this file; it does no I/O and has no clock of its own. Deadline,
quorum and leases are inputs to `decide`, not states. Times are seconds of one monotonic clock, given by the caller.
"""

import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from outerstep.common.quantities import counted, natural
from protocol.messages import FragmentState
from protocol.spec.sections import MembersSpec

NO_OWNERS: Mapping[str, str] = MappingProxyType({})  # the token of no worker is known


class Silence(NamedTuple):
    """A live worker whose heartbeat is overdue: seconds since the last one, and until its lease ends."""

    heard_s: float
    dropped_s: float


NO_SILENCE: Mapping[str, Silence] = MappingProxyType({})

# state -> what happens -> the state after it. docs/rounds.md is drawn from this.
TRANSITIONS: dict[FragmentState, dict[str, FragmentState]] = {
    FragmentState.COLLECTING: {
        "closed": FragmentState.AGGREGATING,  # decide() said Close; the contributors are now fixed
    },
    FragmentState.AGGREGATING: {
        "published": FragmentState.PUBLISHED,  # the delta is durable
        "contribution lost": FragmentState.COLLECTING,  # a file is not what was acknowledged; its worker sends it again
    },
    FragmentState.PUBLISHED: {},
}


def advance(state: FragmentState, what: str) -> FragmentState:
    """Return the state after `what` happened in `state`. ValueError if it cannot happen there."""
    following = TRANSITIONS[state].get(what)
    if following is None:
        raise ValueError(f"{what!r} cannot happen to a fragment that is {state}")
    return following


@dataclass(frozen=True)
class Wait:
    """The decision to wait. `until`: when to decide again if nothing happens; None if only an event can change it.
    `silent`: True if the reason is a silent worker."""

    until: float | None
    reason: str
    silent: bool = False


@dataclass(frozen=True)
class Close:
    """The decision to aggregate now, over `contributors` (in worker-id order, the order of summation)."""

    contributors: tuple[str, ...]
    reason: str


def has_quorum(
    expected: Set[str], contributed: Set[str], policy: MembersSpec, owners: Mapping[str, str] = NO_OWNERS
) -> bool:
    """Return True if more than half of this round's votes have contributed, and at least `min_workers` workers.

    The quorum is counted over `expected` workers. `owners`: the token that each worker joined with. Every token has one
    vote, which its workers share; a worker whose token is unknown has its own vote. If exactly half of the votes have
    contributed, more than half of the workers must have.
    """
    if len(contributed) < policy.min_workers:
        return False
    votes, present = _by_owner(expected | contributed, owners), _by_owner(contributed, owners)
    parts = (Fraction(count, votes[owner]) for owner, count in present.items() if count < votes[owner])
    whole = sum(count == votes[owner] for owner, count in present.items())
    more = 2 * (whole + sum(parts)) - len(votes)
    return more > 0 or (more == 0 and 2 * len(contributed) > votes.total())


def _by_owner(workers: Set[str], owners: Mapping[str, str]) -> Counter[str]:
    """Count the workers of each token. A worker whose token is unknown counts as its own token."""
    return Counter(map(owners.get, workers, workers))


def grace_s(policy: MembersSpec, opened_at: float, quorum_at: float) -> float:
    """Return how long to wait for stragglers after the quorum: in proportion to how long the quorum took."""
    return min(max(policy.grace_factor * (quorum_at - opened_at), policy.grace_min_s), policy.grace_max_s)


def decide(
    expected: Set[str],
    contributed: Set[str],
    policy: MembersSpec,
    *,
    opened_at: float,
    quorum_at: float | None,
    now: float,
    silent: Mapping[str, Silence] = NO_SILENCE,
) -> Wait | Close:
    """Decide whether to wait or to close, with the reason in one sentence.

    `expected`: live workers that hold an assignment for this round and are waited for. `contributed`: workers whose
    contribution was accepted, live or not, because an acknowledged contribution counts. `quorum_at`: when `has_quorum`
    became True; None before. `silent`: live workers with an overdue heartbeat, still waited for, and named first.
    """
    missing = sorted(expected - contributed, key=natural)
    everybody = counted(len(expected | contributed), "worker")
    if not missing:
        if len(contributed) >= policy.min_workers:
            return Close(tuple(sorted(contributed)), f"{_all(len(contributed))} contributed")
        return Wait(
            None,
            f"{len(contributed)} of at least {counted(policy.min_workers, 'worker')} have contributed; "
            "waiting for more workers to join",
        )
    waiting = f"waiting for {len(missing)} of {everybody} ({names_of(missing)})"
    unheard = {worker: silent[worker] for worker in missing if worker in silent}
    if unheard:
        waiting = f"{describe_silence(unheard)}; {waiting}"
    capped_at = math.inf
    if policy.round_max_s is not None and len(contributed) >= policy.min_workers:
        capped_at = opened_at + policy.round_max_s
    graced_at = math.inf if quorum_at is None else quorum_at + grace_s(policy, opened_at, quorum_at)
    closes_at = min(capped_at, graced_at)
    if closes_at == math.inf:
        return Wait(None, f"{waiting}; no deadline before a quorum has contributed", bool(unheard))
    if now < closes_at:
        latest = " at the latest" if quorum_at is None else ""
        return Wait(closes_at, f"{waiting}; closes in {closes_at - now:.0f} s{latest}", bool(unheard))
    if quorum_at is not None and graced_at <= capped_at:
        why = f"after {graced_at - quorum_at:.0f} s of grace"
    else:
        why = f"by the cap of {policy.round_max_s:.0f} s per round"
    return Close(
        tuple(sorted(contributed)),
        f"closed without {names_of(missing)} {why}; {len(contributed)} of {everybody} have contributed",
    )


def _all(workers: int) -> str:
    return "the only worker has" if workers == 1 else f"all {workers} workers have"


def describe_silence(unheard: Mapping[str, Silence]) -> str:
    """Return in words which workers are silent, and since when the one named first, the longest silent, is."""
    longest_first = sorted(unheard, key=lambda worker: (-unheard[worker].heard_s, natural(worker)))
    heard_s, dropped_s = unheard[longest_first[0]]
    are = "is" if len(unheard) == 1 else "are"
    return f"{names_of(longest_first)} {are} silent: last heard {heard_s:.0f} s ago, dropped in {dropped_s:.0f} s"


def names_of(workers: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(workers[:3]) + (f" and {len(workers) - 3} more" if len(workers) > 3 else "")
