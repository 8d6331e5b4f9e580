"""Quarantine: a worker whose contributions were left out repeatedly, or harmed the model, takes no part for a while.
Then it tries again.

Each worker has a reputation: a score between 0 and 1 of how much of its recent contributions has counted. In quarantine
a worker keeps its lease and follows the run. No worker is kept out unless `min_workers` others contribute: each
contribution is judged anyway, and a run that stands still is worse. A member counts as one of those others if it takes
part in the open or next round and has contributed before. A member that only sends heartbeats does not count.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import Change, LiveRun
from coordinator.store.tables import WorkerRow

MEMORY = 0.8  # weight of the earlier score; the rest is the new round's
QUARANTINED = 0.35  # quarantine below this score; five rounds left out in a row lead there
BACK = 0.6  # score after a quarantine; from there three rounds left out in a row lead to the next
FIRST_ROUNDS, MOST_ROUNDS = 10, 320  # length of a quarantine; doubles each time


@dataclass(frozen=True)
class Reputation:
    """score  0 to 1: how much of the worker's contributions has counted; recent rounds weigh most
    times  number of quarantines so far
    until  the round from which it takes part again; 0 if it never was in quarantine
    harm   why it is in quarantine, if that is for measured harm: if it takes part all the same, because too few others
           do, its contributions do not count"""

    score: float = 1.0
    times: int = 0
    until: int = 0
    harm: str = ""

    def after(self, round_: int, counted: float) -> "Reputation":
        """Return the reputation after round `round_`. `counted`: the share of the worker's contribution that counted, 0
        to 1."""
        score = MEMORY * self.score + (1 - MEMORY) * min(counted, 1.0)
        return replace(self, score=score) if score >= QUARANTINED else self.expelled(round_)

    def expelled(self, round_: int, harm: str = "") -> "Reputation":
        """Return the reputation with a quarantine that begins after round `round_`."""
        rounds = min(FIRST_ROUNDS << self.times, MOST_ROUNDS)
        return Reputation(BACK, min(self.times + 1, MOST_ROUNDS.bit_length()), round_ + 1 + rounds, harm)

    def readmitted(self) -> "Reputation":
        """Return the reputation after an operator has ended the quarantine."""
        return replace(self, score=max(self.score, BACK), until=0)


def kept_out(run: LiveRun, workers: Collection[str]) -> set[str]:
    """Return the `workers` that take no part in the open or next round."""
    found = run.members.quarantined(run.round)
    if len(_contributing(run) - found) < run.spec.members.min_workers:
        return set()
    return found & set(workers)


def _contributing(run: LiveRun) -> set[str]:
    """Return the workers that are expected to contribute to the open or next round. Once the open round has lasted
    `round_max_s`, only those that have contributed to it."""
    members, opening, longest_s = run.members, run.open, run.spec.members.round_max_s
    if opening is None:
        return members.contributing(members.candidates())
    if longest_s is not None and run.context.clock() - opening.opened_at >= longest_s:
        return opening.contributed
    return members.contributing(opening.assigned)


def reputation_of(row: WorkerRow) -> Reputation:
    return Reputation(**row.reputation)


def restore(session: Session, run: LiveRun) -> None:
    """Restore from the database which workers are in quarantine, after a start."""
    rows = session.execute(select(WorkerRow.name, WorkerRow.reputation).where(WorkerRow.run_id == run.id))
    for name, stored in rows:
        reputation = Reputation(**stored)
        run.members.quarantine(name, reputation.until, reputation.harm)


def update_reputations(change: Change, round_: int, counted: Mapping[str, float]) -> None:
    """Update each worker's reputation by how much of its contribution to the round counted. Quarantine the workers with
    a score that is too low."""
    run = change.run
    for row in _rows(change.session, run, counted):
        before = reputation_of(row)
        if before.harm and before.until > round_:
            continue  # left out for what it did before
        _set(change, row, after := before.after(round_, counted[row.name]))
        if after.until > before.until:
            message = (
                f"the contributions of {row.name} were left out again and again. It is excluded until round "
                f"{after.until}, unless too few other workers contribute"
            )
            change.record("quarantined", message, worker=row.name, until=after.until)


def expel(change: Change, row: WorkerRow, round_: int, why: str) -> None:
    """Quarantine a worker because of its contribution to round `round_`."""
    _set(change, row, after := reputation_of(row).expelled(round_, why))
    message = f"the contributions of {row.name} do not count until round {after.until}: {why}"
    change.record("quarantined", message, worker=row.name, until=after.until)


def readmit(change: Change, row: WorkerRow) -> bool:
    """End the worker's quarantine. Return False if it is not in quarantine."""
    reputation = reputation_of(row)
    if reputation.until <= change.run.round:
        return False
    _set(change, row, reputation.readmitted())
    return True


def inherit_score(change: Change, row: WorkerRow) -> None:
    """Give a new name the lowest score among its token's other names: a new name must not wipe out a bad score."""
    if row.token is not None:
        others = select(WorkerRow).where(WorkerRow.run_id == row.run_id, WorkerRow.token == row.token)
        scores = [reputation_of(other).score for other in change.session.scalars(others) if other.name != row.name]
        row.reputation = asdict(Reputation(score=min(scores, default=1.0)))


def _set(change: Change, row: WorkerRow, reputation: Reputation) -> None:
    row.reputation = asdict(reputation)
    change.after_commit(partial(change.run.members.quarantine, row.name, reputation.until, reputation.harm))


def _rows(session: Session, run: LiveRun, names: Collection[str]) -> list[WorkerRow]:
    query = select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name.in_(names)).order_by(WorkerRow.name)
    return list(session.scalars(query))
