"""When a round closes: the pure state machine of one (round, fragment).

All decisions about a fragment's state are in this file. It does no I/O and reads no clock. Deadline, quorum and leases
are inputs to `decide`, not states. Times are seconds of one monotonic clock, given by the caller.
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

NO_OWNERS: Mapping[str, str] = MappingProxyType({})  # no worker's token is known


class OverdueHeartbeat(NamedTuple):
    """How long a live worker with an overdue heartbeat has been silent: seconds since its last heartbeat, and seconds
    until its lease ends."""

    since_s: float
    left_s: float


NONE_SILENT: Mapping[str, OverdueHeartbeat] = MappingProxyType({})
NONE_STALLED: Mapping[str, float] = MappingProxyType({})

# state -> event -> the next state. The diagram in docs/rounds.md is drawn from this.
TRANSITIONS: dict[FragmentState, dict[str, FragmentState]] = {
    FragmentState.COLLECTING: {
        "closed": FragmentState.AGGREGATING,  # decide() said Close; the contributors are now fixed
    },
    FragmentState.AGGREGATING: {
        "published": FragmentState.PUBLISHED,  # the delta is durable
        "contribution lost": FragmentState.COLLECTING,  # a contribution's file is damaged; its worker sends it again
    },
    FragmentState.PUBLISHED: {},
}


def advance(state: FragmentState, event: str) -> FragmentState:
    """Return the state that follows `state` after `event`. Raises ValueError if `event` cannot happen in `state`."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise ValueError(f"{event!r} cannot happen to a fragment that is {state}")
    return following


@dataclass(frozen=True)
class Wait:
    """The decision to wait. `until`: when to decide again if nothing happens; None if only an event can change the
    decision. `silent`: True if the fragment waits for a worker with an overdue heartbeat."""

    until: float | None
    reason: str
    silent: bool = False


@dataclass(frozen=True)
class Close:
    """The decision to aggregate now, over `contributors` (in worker-id order, the order of summation)."""

    contributors: tuple[str, ...]
    reason: str


def without_refused(policy: MembersSpec, waited_for: Set[str], contributed: Set[str], refused: Set[str]) -> MembersSpec:
    """Return the policy with a `min_workers` that can be reached without the workers `refused`, who may never send what
    is accepted. It counts them as if they had contributed, so a round with too few workers still waits for more."""
    absent = (refused & waited_for) - contributed
    reachable = len((waited_for | contributed) - absent)
    least = max(1, policy.min_workers - len(absent), min(policy.min_workers, reachable))
    return policy if least >= policy.min_workers else policy.model_copy(update={"min_workers": least})


def has_quorum(
    expected: Set[str], contributed: Set[str], policy: MembersSpec, owners: Mapping[str, str] = NO_OWNERS
) -> bool:
    """Return True if more than half of this round's votes have contributed, and at least `min_workers` workers.

    The quorum is counted over `expected` workers. `owners`: the token that each worker joined with. Every token has one
    vote, which its workers share; a worker with an unknown token has a vote alone. If exactly half of the votes have
    contributed, more than half of the workers must have. Of two votes or two workers, half is enough: no majority can
    be without the other one, which would then hold every round.
    """
    if len(contributed) < policy.min_workers:
        return False
    votes, present = _by_owner(expected | contributed, owners), _by_owner(contributed, owners)
    parts = (Fraction(count, votes[owner]) for owner, count in present.items() if count < votes[owner])
    whole = sum(count == votes[owner] for owner, count in present.items())
    more = 2 * (whole + sum(parts)) - len(votes)
    least = 0 if len(votes) == 2 or votes.total() == 2 else 1
    return more > 0 or (more == 0 and 2 * len(contributed) - votes.total() >= least)


def _by_owner(workers: Set[str], owners: Mapping[str, str]) -> Counter[str]:
    """Count the workers of each token. A worker with an unknown token counts as a separate token."""
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
    grace_from: float = -math.inf,
    silent: Mapping[str, OverdueHeartbeat] = NONE_SILENT,
    stalled: Mapping[str, float] = NONE_STALLED,
) -> Wait | Close:
    """Decide whether to wait or to close, with the reason in one sentence.

    `expected`: live workers that hold an assignment for this round and are waited for. `contributed`: workers with an
    accepted contribution, live or not, because an acknowledged contribution counts. `quorum_at`: when `has_quorum`
    became True; None before. `grace_from`: when the grace may begin at the earliest. `silent`: live workers with an
    overdue heartbeat. They are still waited for, and the reason names them first. `stalled`: live workers that take no
    inner step, and for how many seconds. After the quorum they are not waited for.
    """
    hung = describe_stalled({worker: stalled[worker] for worker in stalled.keys() & expected - contributed})
    awaited = expected if quorum_at is None else expected - stalled.keys()
    missing = sorted(awaited - contributed, key=natural)
    everybody = counted(len(expected | contributed), "worker")
    if not missing:
        if len(contributed) >= policy.min_workers:
            if hung:
                why = f"closed without waiting further, as {hung}; {len(contributed)} of {everybody} have contributed"
                return Close(tuple(sorted(contributed)), why)
            return Close(tuple(sorted(contributed)), f"{_all(len(contributed))} contributed")
        return Wait(
            None,
            f"{len(contributed)} of at least {counted(policy.min_workers, 'worker')} have contributed; "
            "waiting for more workers to join",
        )
    waiting = (f"{hung}; " if hung else "") + f"waiting for {len(missing)} of {everybody} ({names_of(missing)})"
    unheard = {worker: silent[worker] for worker in missing if worker in silent}
    if unheard:
        waiting = f"{describe_silence(unheard)}; {waiting}"
    capped_at = math.inf
    if policy.round_max_s is not None and len(contributed) >= policy.min_workers:
        capped_at = opened_at + policy.round_max_s
    begins_at = None if quorum_at is None else max(quorum_at, grace_from)
    graced_at = math.inf if begins_at is None else begins_at + grace_s(policy, opened_at, begins_at)
    closes_at = min(capped_at, graced_at)
    if closes_at == math.inf:
        return Wait(None, f"{waiting}; no deadline before a quorum has contributed", bool(unheard))
    if now < closes_at:
        latest = " at the latest" if quorum_at is None else ""
        return Wait(closes_at, f"{waiting}; closes in {closes_at - now:.0f} s{latest}", bool(unheard))
    if begins_at is not None and graced_at <= capped_at:
        why = f"after {graced_at - begins_at:.0f} s of grace"
    else:
        why = f"after {policy.round_max_s:.0f} s, the longest that a round may take"
    return Close(
        tuple(sorted(contributed)),
        f"closed without {names_of(missing)} {why}; {len(contributed)} of {everybody} have contributed",
    )


def _all(workers: int) -> str:
    return "the only worker has" if workers == 1 else f"all {workers} workers have"


def describe_silence(unheard: Mapping[str, OverdueHeartbeat]) -> str:
    """Return a sentence that names the silent workers, the longest silent first, with the times of that one."""
    longest_first = sorted(unheard, key=lambda worker: (-unheard[worker].since_s, natural(worker)))
    since_s, left_s = unheard[longest_first[0]]
    are = "is" if len(unheard) == 1 else "are"
    return f"{names_of(longest_first)} {are} silent: last heard {since_s:.0f} s ago, dropped in {left_s:.0f} s"


def describe_stalled(hung: Mapping[str, float]) -> str:
    """Return a sentence that names the stalled workers, the longest stalled first, with the time of that one; empty if
    there are none."""
    if not hung:
        return ""
    longest_first = sorted(hung, key=lambda worker: (-hung[worker], natural(worker)))
    verb = "has" if len(hung) == 1 else "have"
    return f"{names_of(longest_first)} {verb} taken no inner step for {hung[longest_first[0]]:.0f} s"


def names_of(workers: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(workers[:3]) + (f" and {len(workers) - 3} more" if len(workers) > 3 else "")
