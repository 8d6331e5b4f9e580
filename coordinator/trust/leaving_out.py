"""Leave-one-out: which worker's contribution has harmed the last state, by its measured effect on the held-out loss.

No bound on norms and directions excludes all harm: a contribution that looks like the others may still raise the loss
of the next state. So the workers that evaluate a state also measure it as it would be without each worker's last
contribution, on the same held-out tokens. They do so if the loss has risen, and in rounds chosen at random, which no
worker can predict (`is_audited`). If enough of them with different tokens find that the loss is clearly lower without a
worker, that worker is quarantined, and the round is done again without it (`upkeep/redoing.py`).

A worker's own token has no say about it, so neither a lie nor silence of one evaluator decides anything. A false alarm
costs a few small evaluations.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.tables import EvaluationRow, FragmentRow
from coordinator.trust import held_out
from protocol.digest import digest
from protocol.messages import WithoutLosses, WithoutReport

MOST_LIARS = 2  # tokens that may lie together about what they have measured
FEWEST = 3  # tokens among the contributors: with fewer, nobody could judge without being a party
GAIN = 0.01  # nats per token; honest workers measured up to 0.005
GAIN_SHARE = 0.1  # of what the round lowers the loss without the worker
START = 2.0  # times as much at θ, where a delta has 1 + μ times the effect and the next round repairs some of it
RISE = 0.02  # nats per token above the state before; more where the loss usually goes up and down by more
USUAL_RISES = 3.0  # times the usual rise
AUDITED_AT = 0.02  # nats per token: a round that usually lowers the loss by this much or more is always audited
LEAST_AUDITED = 1 / 16  # of the rounds
RECENT = 8  # states that show what is usual
MOST_AT_ONCE = 16  # workers that are left out in an audit, one at a time

Losses = Sequence[tuple[int, float]]  # (state, nats per token), oldest first


# --- pure -------------------------------------------------------------------------------------------------------------


def has_risen(before: Losses, loss: float) -> bool:
    """Return True if `loss` is higher than that of the last state by more than is usual. `before`: the confirmed losses
    of the states before."""
    if not before:
        return False
    recent = [each for _, each in before[-RECENT:]]
    rises = [max(after - earlier, 0.0) for earlier, after in pairwise(recent)]
    usual = statistics.median(rises) if rises else 0.0
    return not loss - recent[-1] <= max(RISE, USUAL_RISES * usual)  # true for NaN


def is_audited(before: Losses, draw: float) -> bool:
    """Return True if the round is audited although the loss has not risen. `draw`: uniform in [0, 1), unknown to
    workers.

    Harm that shows in no rise is at most as large as the fall that it prevents. So the more the loss usually falls in a
    round, the more rounds are audited: the harm that is expected before an audit is about AUDITED_AT."""
    if len(before) < 2:
        return True
    (first, highest), (last, lowest) = before[-RECENT:][0], before[-1]
    usual = (highest - lowest) / (last - first)
    return draw < max(usual / AUDITED_AT, LEAST_AUDITED)


def harm(report: WithoutReport, before: float, rounds: int = 1) -> dict[str, tuple[float, float]]:
    """Return the workers without whose contribution the loss is clearly lower: by worker, the loss with it and without.
    `before`: the loss as many `rounds` before."""
    fall = (before - min(report.reached.without.values())) / rounds
    least = max(GAIN, GAIN_SHARE * fall)
    found = {} if report.start is None else _lower_without(report.start, START * least)
    return found | _lower_without(report.reached, least)


def _lower_without(losses: WithoutLosses, least: float) -> dict[str, tuple[float, float]]:
    """Return the workers without whom the loss is lower by more than `least`. Where leaving out most of the workers
    lowers it, that says nothing about one of them."""
    gains = {worker: losses.loss - loss for worker, loss in losses.without.items()}
    usual = max(statistics.median_low(gains.values()), 0.0)
    return {worker: (losses.loss, losses.without[worker]) for worker, gain in gains.items() if gain - usual > least}


def liars(tokens: int) -> int:
    """Return how many of this many tokens may lie together without deciding anything: a third of them, one at least and
    MOST_LIARS at most. So twice as many evaluators and one more are asked, and more than that must agree."""
    return min(max(tokens // 3, 1), MOST_LIARS)


def agreed(found: Mapping[str, Collection[str]], owners: Mapping[str, str]) -> set[str]:
    """Return the workers to leave out. `found`: the harmful workers, by the evaluator that says so. `owners`: the token
    of each worker; only evaluators and workers with a known one count.

    More tokens than may lie together must say so, and more than half of those that have measured. A worker's own token
    has no say. Nobody is left out if that would be half of the tokens or more."""
    out, most = set(), liars(len(set(owners.values())))
    for worker in set().union(*found.values()) & owners.keys():
        judges = {owners[each] for each in found if each in owners} - {owners[worker]}
        accusers = {owners[each] for each, workers in found.items() if each in owners and worker in workers}
        accusers -= {owners[worker]}
        if len(accusers) > most and 2 * len(accusers) > len(judges):
            out.add(worker)
    return out if 2 * len({owners[worker] for worker in out}) < len(set(owners.values())) else set()


# --- of a run ---------------------------------------------------------------------------------------------------------


def to_measure(run: LiveRun, session: Session, state: int, loss: float) -> list[str]:
    """Return the workers that an evaluator which has measured `loss` for `state` should leave out, one at a time."""
    if state == 0 or state != run.round or (workers := contributors(run, session, state)) is None:
        return []
    before = confirmed_losses(run, session, state)
    if has_risen(before, loss):
        return sorted(workers)
    if not is_audited(before, _draw(run, state, "audit")):
        return []
    return sorted(sorted(workers, key=lambda worker: _draw(run, state, worker))[:MOST_AT_ONCE])


def is_possible(run: LiveRun) -> bool:
    """Return True if a worker may be left out: all train on the same data, which are not private, and there are enough
    tokens to judge each other. An evaluator could compute the contribution from the two states that it sees."""
    return run.shares_data and not run.spec.data.private and len(set(run.members.owners.values())) >= FEWEST


def contributors(run: LiveRun, session: Session, state: int) -> dict[str, str] | None:
    """Return the workers whose contributions led from the state before to `state`, with their tokens. None if no worker
    may be left out."""
    if not is_possible(run):
        return None
    rows = session.scalars(
        select(FragmentRow.verdicts).where(FragmentRow.run_id == run.id, FragmentRow.round == state - 1)
    ).all()
    counted = [{worker for worker, verdict in verdicts.items() if verdict["factor"] > 0} for verdicts in rows]
    if any(len(each) < FEWEST for each in counted):
        return None
    owners = {worker: run.members.owners[worker] for worker in set().union(*counted) & run.members.owners.keys()}
    return owners if len(set(owners.values())) >= FEWEST else None


def found_harmful(run: LiveRun, session: Session, state: int) -> dict[str, list[tuple[str, float, float]]]:
    """Return the workers to leave out of the round before `state`, with what was measured of each: (evaluator, loss,
    loss without the worker)."""
    rows = session.scalars(
        select(EvaluationRow).where(EvaluationRow.run_id == run.id, EvaluationRow.round == state)
    ).all()
    reports = {row.worker: WithoutReport.model_validate(row.without) for row in rows if row.without is not None}
    owners = contributors(run, session, state) if reports else None
    before = confirmed_losses(run, session, state)
    if owners is None or not before:
        return {}
    last, loss = before[-1]
    judging = owners | {each: run.members.owners[each] for each in reports if each in run.members.owners}
    found = {evaluator: harm(report, loss, state - last) for evaluator, report in sorted(reports.items())}
    harmful = agreed({evaluator: each.keys() & owners.keys() for evaluator, each in found.items()}, judging)
    return {
        worker: [(evaluator, *each[worker]) for evaluator, each in found.items() if worker in each]
        for worker in sorted(harmful)
    }


def confirmed_losses(run: LiveRun, session: Session, state: int) -> list[tuple[int, float]]:
    """Return (state, loss) for the last states before `state` with a confirmed held-out loss, oldest first."""
    measured = held_out.evaluations_of(session, run.id, range(max(state - 2 * RECENT, 0), state))
    means = {each: held_out.mean([one for one in found.values() if one.confirmed]) for each, found in measured.items()}
    return [(each, mean.loss) for each, mean in sorted(means.items()) if mean is not None]


def _draw(run: LiveRun, state: int, what: str) -> float:
    """Return a number in [0, 1) that no worker can predict."""
    drawn = digest(run.context.secret + f"{run.name}/{run.created_at}/{state}/{what}".encode())
    return int.from_bytes(drawn[:6], "big") / (1 << 48)
