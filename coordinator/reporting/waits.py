"""What workers waited for in a round, what would have saved that, and what each worker adds. Pure.

The parts of a sync follow one another: upload, other workers, averaging, download. If training goes on meanwhile, it
waits only for the end of the sync, so the time that it waited is assigned to the parts from the last one backwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocol.messages import Account, Adds, Stage, Waiting, Waits
from protocol.spec.sections import MOST_ROUNDS, SyncSpec


@dataclass(frozen=True)
class RoundTimes:
    """When the last fragment of a round was collected, and published: Unix times; None if it was not yet. `sent_at`: by
    worker, when the last fragment of its contribution was accepted."""

    fragments: int
    collected_at: float | None
    published_at: float | None
    sent_at: Mapping[str, float]


def waits_of(worker: str, account: Account, times: RoundTimes) -> Waits:
    """Return what the worker waited for. `account`: its report of the round."""
    left = _seconds(account, Stage.SYNC, Stage.GATHER)
    sent_at = times.sent_at.get(worker)
    others = coordinator = 0.0
    if sent_at is not None and times.collected_at is not None and times.published_at is not None:
        others = max(times.collected_at - sent_at, 0.0)
        coordinator = max(times.published_at - max(times.collected_at, sent_at), 0.0)
    # The downloads overlap with the uploads of later fragments. At least the last one comes after everything else.
    down = _seconds(account, Stage.DOWNLOAD, Stage.OUTER_STEP)
    rest = left - _seconds(account, Stage.GATHER, Stage.UPLOAD) - others - coordinator
    parts = {"download": min(max(rest, down / times.fragments), down), "coordinator": coordinator, "workers": others}
    waits = {"opening": _seconds(account, Stage.WAIT)}
    for name, seconds in parts.items():
        waits[name] = min(seconds, left)
        left -= waits[name]
    return Waits(upload=left, **waits)


def waiting(accounts: Mapping[str, Account], waits: Mapping[str, Waits], sync: SyncSpec) -> Waiting | None:
    """Return the shares for all workers of a round together; None if none has reported."""
    total = sum(account.total_s for account in accounts.values())
    if total <= 0:
        return None
    syncs = {worker: each.total_s - each.opening for worker, each in waits.items()}
    beyond = {worker: MOST_ROUNDS * _seconds(account, Stage.TRAIN) for worker, account in accounts.items()}
    saved = sum(min(syncs[worker], beyond[worker]) for worker in accounts)
    return Waiting(
        share=sum(each.total_s for each in waits.values()) / total,
        never=None if sync.wait == "never" else saved / total,
        doubled_h=sum(syncs.values()) / 2 / total,
    )


def held_s(worker: str, times: RoundTimes, waits: Mapping[str, Waits]) -> float | None:
    """Return for how long the training of all other workers stood still because `worker` had not contributed yet; None
    if no other worker has reported. `waits`: of the workers that have."""
    sent = times.sent_at
    others = [each for each in sent if each != worker]
    stood_still = [waits[each].workers for each in others if each in waits]
    if times.collected_at is None or not stood_still:
        return 0.0 if times.collected_at is not None and not others else None
    until = min(sent.get(worker, times.collected_at), times.collected_at)
    return min(max(until - max(sent[each] for each in others), 0.0), *stood_still)


def adds_of(
    workers: Iterable[str],
    tokens: Mapping[str, int],
    weights: Mapping[str, float],
    times: RoundTimes,
    waits: Mapping[str, Waits],
) -> dict[str, Adds]:
    """Return what each of `workers` adds. `tokens` and `weights`: of their contributions, over all fragments."""
    all_tokens, all_weights = sum(tokens.values()) or 1, sum(weights.values()) or 1
    return {
        each: Adds(
            tokens=tokens.get(each, 0) / all_tokens,
            weight=weights.get(each, 0) / all_weights,
            held_s=held_s(each, times, waits),
        )
        for each in sorted(workers)
    }


def _seconds(account: Account, *stages: Stage) -> float:
    return sum((account.seconds.get(stage, 0.0) for stage in stages), 0.0)
