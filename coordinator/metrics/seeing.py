"""What is read of a run when it is scraped: memory, and a handful of queries, as a report of the run reads them.

The run's lock is held only to read from memory, never while the database or the disk is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select

from coordinator import reports, round_reports
from coordinator.run.live_run import LiveRun
from coordinator.store.tables import CheckpointRow, RunRow, WorkerRow
from coordinator.trust.guard import has_paused
from protocol.messages import DiskBytes, Metrics, RoundInfo, RunInfo

WORKERS = 200  # of one run that are shown, by name


@dataclass(frozen=True)
class SeenWorker:
    """A live worker. `joins`: how many times it has joined."""

    name: str
    last_seen_s: float
    metrics: Metrics
    joins: int


@dataclass(frozen=True)
class SeenRun:
    """A run. Ages are in seconds; None where there is nothing to have one. `last_round`: the last one published."""

    info: RunInfo
    paused_by_guard: bool
    open_round_age_s: float | None
    last_round: RoundInfo | None
    last_round_age_s: float | None
    checkpoint_age_s: float | None
    events: Mapping[str, int]
    outcomes: Mapping[str, int]
    quarantined: int
    disk: DiskBytes
    workers: list[SeenWorker]


def see(run: LiveRun) -> SeenRun:
    """Look at a run."""
    info, now = reports.run_info(run), run.context.now()
    published = round_reports.rounds(run, 1, info.round).items
    last = published[0] if published else None
    with run.context.database.read() as session:
        checkpoint_at = session.scalar(
            select(CheckpointRow.created_at)
            .where(CheckpointRow.run_id == run.id)
            .order_by(CheckpointRow.round.desc())
            .limit(1)
        )
        by_guard = has_paused(run, session.get_one(RunRow, run.id))
        joins = dict(
            session.execute(
                select(WorkerRow.name, WorkerRow.epoch)
                .where(WorkerRow.run_id == run.id, WorkerRow.token_hash.is_not(None))
                .order_by(WorkerRow.name)
                .limit(WORKERS)
            ).all()
        )
    with run.briefly_locked():
        clock, opening = run.context.clock(), run.open
        events, outcomes = dict(run.counters.events), dict(run.counters.outcomes)
        quarantined = len(run.members.quarantined(run.round))
    workers = [
        SeenWorker(name, seen_s, run.members.metrics(name), times)
        for name, times in joins.items()
        if (seen_s := run.members.last_seen_s(name, clock)) is not None  # its lease may have ended meanwhile
    ]
    return SeenRun(
        info=info,
        paused_by_guard=by_guard,
        open_round_age_s=None if opening is None or run.ended else clock - opening.opened_at,
        last_round=last,
        last_round_age_s=None if last is None or last.closed_at is None else max(0.0, now - last.closed_at),
        checkpoint_age_s=None if checkpoint_at is None else max(0.0, now - checkpoint_at),
        events=events,
        outcomes=outcomes,
        quarantined=quarantined,
        disk=reports.disk_bytes(run),
        workers=workers,
    )
