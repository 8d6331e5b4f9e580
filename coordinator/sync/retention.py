"""Retention: what is deleted, and when. Nothing is deleted before a checkpoint covers it.

**Blobs.** The newest `checkpoints.keep` checkpoints are kept, and every delta from the oldest of them on, so a worker
can always get from there to the present. The delta that led to the newest checkpoint is always kept, because workers
are fetching it. Contributions are deleted once a checkpoint covers them, and so are the residuals of deltas before it:
a run that is rolled back further continues without them. If the last round may be done again (`upkeep/redoing.py`),
everything of it is kept until the next one is over, and a checkpoint from before it.

**Rows.** Each contribution, assignment and report is kept for the last `retention.rounds` rounds, and for every round
whose delta is kept. For older rounds only sums are kept. The newest `retention.events` events are kept.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.blobs import Kind, round_of
from coordinator.store.tables import (
    AssignmentRow,
    CheckpointFragmentRow,
    CheckpointRow,
    ContributionRow,
    EventRow,
    FragmentRow,
    LateContributionRow,
    ReportRow,
    RoundRow,
)
from coordinator.trust import held_out, leaving_out

Sums = tuple[int, float | None, int, int]
Latest = tuple[float | None, float | None, float | None]

EVENTS_SLACK = 500  # events above the limit before a deletion is worthwhile


def complete_checkpoints(run: LiveRun) -> list[int]:
    """Return the rounds of the complete checkpoints, newest first. Those that are damaged for good are left out."""
    with run.context.database.read() as session:
        rounds = session.scalars(
            select(CheckpointRow.round).where(CheckpointRow.run_id == run.id).order_by(CheckpointRow.round.desc())
        ).all()
    return [round_ for round_ in rounds if round_ not in run.outer.damaged_checkpoints]


def kept_checkpoints(run: LiveRun) -> list[int]:
    """Return the rounds of the checkpoints that are kept, newest first. One is older than the run's state if the last
    round may be done again."""
    complete = complete_checkpoints(run)
    kept = complete[: run.spec.checkpoints.keep]
    return kept + [round_ for round_ in _before(run, complete) if round_ not in kept]


def _before(run: LiveRun, kept: list[int]) -> list[int]:
    """Return the newest of the checkpoints `kept` that is older than the run's state, if the last round may be done
    again from it."""
    return [round_ for round_ in kept if round_ < run.round][:1] if leaving_out.is_possible(run) else []


def oldest_checkpoint(run: LiveRun) -> int:
    """Return the round of the oldest checkpoint that is kept. The run cannot be rolled back further."""
    kept = kept_checkpoints(run)
    return kept[-1] if kept else 0


def first_delta(kept: list[int]) -> int:
    """Return the oldest round with a delta that is kept. `kept`: the rounds of the kept checkpoints, newest first."""
    return min(kept[-1], kept[0] - 1)


def keeps_delta(run: LiveRun, round_: int) -> bool:
    """Return True if the retention rule keeps the deltas of `round_`."""
    kept = kept_checkpoints(run)
    return not kept or round_ >= first_delta(kept)


def oldest_kept(run: LiveRun) -> dict[Kind, int]:
    """Return, for each kind of blob, the first round that the retention rule keeps; empty if there is no checkpoint."""
    kept = kept_checkpoints(run)
    if not kept:
        return {}
    covering = (_before(run, kept) or kept)[0]
    return {
        "checkpoints": kept[-1],
        "deltas": first_delta(kept),
        "contributions": covering,
        "residuals": covering - 1,
    }


def recorded_bytes(run: LiveRun) -> dict[Kind, int]:
    """Return the bytes of the run's blobs that the retention rule keeps, by kind, from their rows."""
    first = oldest_kept(run)
    sizes: dict[Kind, tuple[Any, Any]] = {
        "contributions": (ContributionRow, ContributionRow.size),
        "deltas": (FragmentRow, FragmentRow.delta_bytes),
        "checkpoints": (CheckpointFragmentRow, CheckpointFragmentRow.size),
        "residuals": (FragmentRow, FragmentRow.residual_bytes),
    }
    with run.context.database.read() as session:
        return {
            kind: session.scalar(
                select(func.coalesce(func.sum(size), 0)).where(row.run_id == run.id, row.round >= first.get(kind, 0))
            )
            or 0
            for kind, (row, size) in sizes.items()
        }


def clean(run: LiveRun) -> None:
    """Delete what the retention rule does not keep: the rows under the run's lock, then the blobs without it.

    Callers must not hold the lock, because with a thousand workers there are tens of thousands of files. Rows are
    deleted first, so no row names a missing blob. A blob below `oldest_kept` is never needed again: the bounds only
    rise, and the run cannot be rolled back or removed while one of its jobs is running. After a crash, the next start
    deletes the rest (`upkeep/restoring.py`).

    If the blobs are in a bucket, a backup without the rows is made in between, and the blobs that backups need stay.
    """
    first_rounds = forget(run)
    needed = run.context.back_up()
    for kind, first in first_rounds.items():
        found = (name for name, _ in run.blobs.list(run.names.kind(kind)) if round_of(name) < first)
        run.blobs.delete(*(name for name in found if name not in needed))


def forget(run: LiveRun) -> dict[Kind, int]:
    """Delete the rows that the retention rule does not keep. Return the result of `oldest_kept`."""
    with run.lock:
        if not (first_rounds := oldest_kept(run)):
            return {}  # the checkpoint was damaged in the meantime
        newest, kept = first_rounds["contributions"], kept_checkpoints(run)
        with run.change() as change:
            for table in (CheckpointRow, CheckpointFragmentRow):
                change.session.execute(
                    delete(table).where(table.run_id == run.id, table.round < newest, table.round.not_in(kept))
                )
            change.session.execute(
                update(FragmentRow)
                .where(FragmentRow.run_id == run.id, FragmentRow.round < first_rounds["residuals"])
                .where(FragmentRow.residual_digest.is_not(None))
                .values(residual_bytes=None, residual_digest=None)
            )
            summed_before = min(first_rounds["deltas"], run.round - run.spec.retention.rounds)
            _forget_history(run, change.session, summed_before)
    return first_rounds


def _forget_history(run: LiveRun, session: Session, before: int) -> None:
    """Replace the rows of rounds before `before` with their sums."""
    rows = session.scalars(
        select(RoundRow).where(RoundRow.run_id == run.id, RoundRow.round < before, RoundRow.tokens.is_(None))
    ).all()
    for row in rows:
        (summed,) = sums_of(session, run.id, [row.round]).values()
        row.tokens, row.loss, row.upload_bytes, row.delta_bytes = summed
        ((row.quorum_at, row.collected_at, row.aggregated_at),) = latest_of(session, run.id, [row.round]).values()
    if rows:
        session.flush()
        held_out.replace_by_means(session, run.id, before)
        for table in (ContributionRow, LateContributionRow, FragmentRow, AssignmentRow, ReportRow):
            session.execute(delete(table).where(table.run_id == run.id, table.round < before))


def sums_of(session: Session, run_id: int, rounds: Sequence[int]) -> dict[int, Sums]:
    """Return (tokens, loss, contribution bytes, delta bytes) of each of `rounds`. The loss is the mean training loss
    weighted by tokens, over the workers that reported one."""
    if not rounds:
        return {}
    first, last = min(rounds), max(rounds)
    key = (ContributionRow.run_id == run_id, ContributionRow.round.between(first, last))
    per_worker = (  # the rows of a worker's fragments all have the same tokens and loss
        select(
            ContributionRow.round.label("round"),
            func.max(ContributionRow.tokens).label("tokens"),
            func.max(ContributionRow.loss).label("loss"),
        )
        .where(*key)
        .group_by(ContributionRow.round, ContributionRow.worker)
        .subquery()
    )
    reported = case((per_worker.c.loss.is_not(None), per_worker.c.tokens))
    columns = func.sum(per_worker.c.tokens), func.sum(reported), func.sum(reported * per_worker.c.loss)
    trained = session.execute(select(per_worker.c.round, *columns).group_by(per_worker.c.round))
    uploaded = session.execute(
        select(ContributionRow.round, func.sum(ContributionRow.size)).where(*key).group_by(ContributionRow.round)
    )
    delta = session.execute(
        select(FragmentRow.round, func.sum(FragmentRow.delta_bytes))
        .where(FragmentRow.run_id == run_id, FragmentRow.round.between(first, last))
        .group_by(FragmentRow.round)
    )
    tokens = {
        round_: (total, weighted / reporting if reporting else None) for round_, total, reporting, weighted in trained
    }
    up, down = ({each[0]: each[1] for each in found} for found in (uploaded, delta))
    return {round_: (*tokens.get(round_, (0, None)), up.get(round_) or 0, down.get(round_) or 0) for round_ in rounds}


def latest_of(session: Session, run_id: int, rounds: Sequence[int]) -> dict[int, Latest]:
    """Return (quorum, closed, aggregated) of each of `rounds`: the times when its last fragment got there, in seconds
    since 1970; None for what has not happened yet."""
    if not rounds:
        return {}
    columns = (FragmentRow.quorum_at, FragmentRow.closed_at, FragmentRow.aggregated_at)
    query = select(FragmentRow.round, *(case((func.count(each) == func.count(), func.max(each))) for each in columns))
    within = FragmentRow.round.between(min(rounds), max(rounds))
    found = session.execute(query.where(FragmentRow.run_id == run_id, within).group_by(FragmentRow.round))
    by_round = {
        round_: (quorum_at, collected_at, aggregated_at) for round_, quorum_at, collected_at, aggregated_at in found
    }
    return {round_: by_round.get(round_, (None, None, None)) for round_ in rounds}


def trim_events(run: LiveRun) -> None:
    """Delete the oldest events above the limit, once there may be EVENTS_SLACK too many."""
    if run.events_recorded < EVENTS_SLACK:
        return
    with run.change() as change:
        newest_to_delete = change.session.scalars(
            select(EventRow.id)
            .where(EventRow.run_id == run.id)
            .order_by(EventRow.id.desc())
            .offset(run.spec.retention.events)
            .limit(1)
        ).one_or_none()
        if newest_to_delete is not None:
            change.session.execute(delete(EventRow).where(EventRow.run_id == run.id, EventRow.id <= newest_to_delete))
        change.after_commit(lambda: setattr(run, "events_recorded", 0))
