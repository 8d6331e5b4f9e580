"""What a worker may carry from rounds that it missed, by the coordinator's own record.

A worker may carry the work of a round that it was assigned, that closed without it, and since which it has not
contributed. Every look into the record is bounded by LOOKED_BACK rounds; what is older, or was deleted by retention, is
unknown: it is neither refused nor allowed for.
"""

from collections.abc import Iterable

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.tables import AssignmentRow, ContributionRow, RoundRow

LOOKED_BACK = 1000  # rounds; each is one look-up by primary key


def last_contribution(session: Session, run: LiveRun, worker: str, fragment: int, rounds: range) -> int | None:
    """Return the last of `rounds` in which the worker has contributed to the fragment; None if there is none."""
    return session.scalar(
        select(func.max(ContributionRow.round)).where(
            ContributionRow.run_id == run.id,
            ContributionRow.round.in_(_near(rounds)),
            ContributionRow.fragment == fragment,
            ContributionRow.worker == worker,
        )
    )


def assigned_steps(session: Session, run: LiveRun, worker: str, rounds: range) -> dict[int, int]:
    """Return the inner steps that the worker was assigned in each of `rounds`, as far as it was."""
    rows = session.execute(
        select(AssignmentRow.round, AssignmentRow.inner_steps).where(
            AssignmentRow.run_id == run.id, AssignmentRow.round.in_(_near(rounds)), AssignmentRow.worker == worker
        )
    )
    return {row.round: row.inner_steps for row in rows}


def weighed_tokens(session: Session, run: LiveRun, worker: str, fragment: int, rounds: range) -> int:
    """Return the tokens that the worker's contributions to the fragment weighed in `rounds`."""
    found = session.scalar(
        select(func.sum(ContributionRow.tokens)).where(
            ContributionRow.run_id == run.id,
            ContributionRow.round.in_(_near(rounds)),
            ContributionRow.fragment == fragment,
            ContributionRow.worker == worker,
        )
    )
    return found or 0


def known(session: Session, run: LiveRun, rounds: Iterable[int], before: int) -> list[int]:
    """Return those of `rounds` whose rows are kept, and that are not longer ago than the look back from `before`."""
    forgotten = session.scalar(
        select(func.max(RoundRow.round)).where(RoundRow.run_id == run.id, RoundRow.tokens.is_not(None))
    )
    first = max(before - LOOKED_BACK, -1 if forgotten is None else forgotten + 1)
    return [round_ for round_ in rounds if round_ >= first]


def carriable_units(session: Session, run: LiveRun, worker: str) -> int:
    """Return the most units of earlier rounds that the worker may still have work on: those that it was assigned since
    it contributed last. Where fragments travel beside the training, units of that round may be among them."""
    rounds = range(run.round)
    last = last_contribution(session, run, worker, 0, rounds)
    since = 0 if last is None else last + (not run.spec.sync.streams)
    return sum(assigned_steps(session, run, worker, range(since, run.round)).values())


def _near(rounds: range) -> range:
    return rounds[-LOOKED_BACK:]
