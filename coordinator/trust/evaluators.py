"""Who measures the held-out loss of a state: where all hold out the same text, two workers of different tokens.

They take turns, so nobody is believed alone. Where the two differ nobody knows who is right: of the next state three
are asked, and who is alone then is not asked for a while.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.tables import EventRow
from coordinator.trust import held_out

USUALLY, IN_DOUBT = 2, 3
NOT_ASKED = 16  # evaluated states for which a worker is not asked that was alone with what it said


def is_evaluated(run: LiveRun) -> bool:
    """Return True if the state from which the open or next round starts is to be evaluated."""
    return run.round % run.spec.evaluation.every_rounds == 0


def evaluators(run: LiveRun, session: Session, workers: Sequence[str]) -> set[str]:
    """Return which of those that take part in the next round evaluate the state from which it starts."""
    if not is_evaluated(run):
        return set()
    if run.spec.data.private:
        return set(workers)
    every = run.spec.evaluation.every_rounds
    before = held_out.evaluations(session, run.id, run.round - every)
    count = IN_DOUBT if len(before) > 1 and not any(each.confirmed for each in before.values()) else USUALLY
    doubted = _doubted(run, session, run.round - NOT_ASKED * every)
    trusted = [worker for worker in workers if worker not in doubted] or list(workers)
    return set(in_turn(trusted, {worker: run.members.token(worker) for worker in trusted}, run.round // every, count))


def in_turn(workers: Sequence[str], tokens: Mapping[str, str | None], turn: int, count: int) -> list[str]:
    """Return up to `count` of the workers, from the one whose turn it is, no two of the same token."""
    chosen: dict[str | None, str] = {}
    for k in range(len(workers)):
        worker = workers[(turn + k) % len(workers)]
        if len(chosen) < count:
            chosen.setdefault(tokens[worker], worker)
    return list(chosen.values())


def _doubted(run: LiveRun, session: Session, since: int) -> set[str]:
    """Return the workers that were alone with what they said of state `since` or a later one."""
    told = session.scalars(
        select(EventRow.data).where(EventRow.run_id == run.id, EventRow.kind == "evaluation-refuted")
    )
    return {data["worker"] for data in told if data["round"] >= since}
