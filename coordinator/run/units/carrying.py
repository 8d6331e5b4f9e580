"""What a worker may carry from rounds that it missed, according to the coordinator's own record.

A worker may carry the work of a round that it was assigned and that closed without it, if it has not contributed since.
The record is searched at most LOOKED_BACK rounds back. Older rounds and rounds deleted by retention are unknown: a
contribution that carries them is not rejected, but they do not raise its limits either.
"""

from collections.abc import Iterable, Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.aggregation.tasks import NOT_LATE, Lateness
from coordinator.run.live_run import LiveRun
from coordinator.run.units.ledger import count_by_round
from coordinator.store.tables import AssignmentRow, ContributionRow, FragmentRow, RoundRow
from protocol.errors import Problem
from protocol.wire import ContributionHeader

LOOKED_BACK = 1000  # rounds; each is one look-up by primary key
MOST_ADDED = 64  # most rounds to read the contributors of, for one contribution


def last_contribution(session: Session, run: LiveRun, worker: str, fragment: int, rounds: range) -> int | None:
    """Return the last of `rounds` in which the worker contributed to the fragment; None if it did in none."""
    return session.scalar(
        select(func.max(ContributionRow.round)).where(
            ContributionRow.run_id == run.id,
            ContributionRow.round.in_(_recent(rounds)),
            ContributionRow.fragment == fragment,
            ContributionRow.worker == worker,
        )
    )


def assigned_steps(session: Session, run: LiveRun, worker: str, rounds: range) -> dict[int, int]:
    """Return the most inner steps of the worker's assignments for `rounds`, by round. Rounds without an assignment are
    left out."""
    rows = session.execute(
        select(AssignmentRow.round, AssignmentRow.inner_steps).where(
            AssignmentRow.run_id == run.id, AssignmentRow.round.in_(_recent(rounds)), AssignmentRow.worker == worker
        )
    )
    return {row.round: run.spec.sync.most_steps_of(row.inner_steps) for row in rows}


def weighed_tokens(session: Session, run: LiveRun, worker: str, fragment: int, rounds: range) -> int:
    """Return the total weight, in tokens, of the worker's contributions to the fragment in `rounds`."""
    found = session.scalar(
        select(func.sum(ContributionRow.tokens)).where(
            ContributionRow.run_id == run.id,
            ContributionRow.round.in_(_recent(rounds)),
            ContributionRow.fragment == fragment,
            ContributionRow.worker == worker,
        )
    )
    return found or 0


def known_rounds(session: Session, run: LiveRun, rounds: Iterable[int], before: int) -> list[int]:
    """Return those of `rounds` that are still recorded, and at most LOOKED_BACK rounds before `before`."""
    forgotten = session.scalar(
        select(func.max(RoundRow.round)).where(RoundRow.run_id == run.id, RoundRow.tokens.is_not(None))
    )
    first = max(before - LOOKED_BACK, -1 if forgotten is None else forgotten + 1)
    return [round_ for round_ in rounds if round_ >= first]


def carriable_units(session: Session, run: LiveRun, worker: str) -> int:
    """Return the largest number of units of earlier rounds that the worker may still have work on: those it was
    assigned since its last contribution. If fragments are sent during training, the units of that contribution's round
    are included."""
    rounds = range(run.round)
    last = last_contribution(session, run, worker, 0, rounds)
    since = 0 if last is None else last + (not run.spec.sync.streams)
    return sum(assigned_steps(session, run, worker, range(since, run.round)).values())


def late_work(run: LiveRun, header: ContributionHeader) -> Lateness:
    """Return how much work of missed rounds the contribution may contain, from the coordinator's own record. Raises
    Problem `units-not-held` if `carried` names a round that contradicts the record."""
    if not header.carried:
        return NOT_LATE
    worker, since = header.worker, range(header.carried[0], header.round)
    with run.context.database.read() as session:
        contributed = last_contribution(session, run, worker, header.fragment, since)
        assigned = assigned_steps(session, run, worker, since)
        known = known_rounds(session, run, header.carried, header.round)
        own = count_by_round(session, run.id, worker, header.round, header.units)[header.round]
        missed = largest_shares(session, run, header.fragment, known)
    refused = f"header field carried is {header.carried[:5]}: fragment {header.fragment} cannot carry work of round"
    if contributed is not None:
        detail = f"{refused} {since.start}, because {worker} has contributed to round {contributed} since then"
        raise Problem("units-not-held", f"{detail}; drop that work")
    for round_ in known:
        if round_ not in assigned:
            raise Problem("units-not-held", f"{refused} {round_}, in which {worker} had no assignment; drop that work")
    return Lateness(len(known), missed, own == 0)


def largest_shares(session: Session, run: LiveRun, fragment: int, rounds: Sequence[int]) -> float:
    """Return the largest share of a single worker in each round's mean of the fragment, added up over `rounds`; the
    number of rounds, which is never less, if they are more than MOST_ADDED."""
    if len(rounds) > MOST_ADDED:
        return float(len(rounds))
    contributors = session.scalars(
        select(FragmentRow.contributors).where(
            FragmentRow.run_id == run.id, FragmentRow.round.in_(rounds), FragmentRow.fragment == fragment
        )
    )
    shares = [max(tokens.values()) / sum(tokens.values()) for tokens in contributors if tokens]
    return float(sum(shares))


def _recent(rounds: range) -> range:
    return rounds[-LOOKED_BACK:]
