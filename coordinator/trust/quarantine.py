"""Workers whose contributions were left out again and again take no part for a while. Then they may try again.

They keep their lease and follow the run. Nobody is kept out if fewer than `min_workers` others contribute: each
contribution is judged all the same, and a run that stands still is worse. A member counts as one of those others if it
takes part in the open or next round and has contributed before. A heartbeat alone keeps a lease, but replaces nobody.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import Change, LiveRun
from coordinator.screening.standing import Standing
from coordinator.store.tables import WorkerRow


def kept_out(run: LiveRun, workers: Collection[str]) -> set[str]:
    """Return those of `workers` that take no part in the open or next round."""
    found = run.members.quarantined(run.round)
    if len(_contributing(run) - found) < run.spec.members.min_workers:
        return set()
    return found & set(workers)


def _contributing(run: LiveRun) -> set[str]:
    """Return the workers that are expected to contribute to the open or next round. If the open round has lasted for
    `round_max_s`: only those that have contributed to it."""
    members, opening, longest_s = run.members, run.open, run.spec.members.round_max_s
    if opening is None:
        return members.contributing(members.candidates())
    if longest_s is not None and run.world.clock() - opening.opened_at >= longest_s:
        return opening.contributed
    return members.contributing(opening.assigned)


def standing_of(row: WorkerRow) -> Standing:
    return Standing(**row.standing)


def restore(session: Session, run: LiveRun) -> None:
    """Remember after a start who is in quarantine."""
    for name, standing in session.execute(select(WorkerRow.name, WorkerRow.standing).where(WorkerRow.run_id == run.id)):
        run.members.quarantine(name, Standing(**standing).until)


def judge_round(change: Change, round_: int, counted: Mapping[str, float]) -> None:
    """Note how much of each worker's contribution to a round has counted, and put in quarantine who is due for it."""
    run = change.run
    for row in _rows(change.session, run, counted):
        before = standing_of(row)
        _stand(change, row, after := before.after(round_, counted[row.name]))
        if after.until > before.until:
            message = (
                f"the contributions of {row.name} were left out again and again: it takes no part before round "
                f"{after.until}, unless the run has too few others"
            )
            change.record("quarantined", message, worker=row.name, until=after.until)


def readmit(change: Change, row: WorkerRow) -> bool:
    """End the worker's quarantine; return False where it is in none."""
    standing = standing_of(row)
    if standing.until <= change.run.round:
        return False
    _stand(change, row, standing.readmitted())
    return True


def inherit(change: Change, row: WorkerRow) -> None:
    """Give a new name the least score of its token's others: another name is no way out."""
    if row.token is not None:
        others = select(WorkerRow).where(WorkerRow.run_id == row.run_id, WorkerRow.token == row.token)
        scores = [standing_of(other).score for other in change.session.scalars(others) if other.name != row.name]
        row.standing = asdict(Standing(score=min(scores, default=1.0)))


def _stand(change: Change, row: WorkerRow, standing: Standing) -> None:
    row.standing = asdict(standing)
    change.then(partial(change.run.members.quarantine, row.name, standing.until))


def _rows(session: Session, run: LiveRun, names: Collection[str]) -> list[WorkerRow]:
    query = select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name.in_(names)).order_by(WorkerRow.name)
    return list(session.scalars(query))
