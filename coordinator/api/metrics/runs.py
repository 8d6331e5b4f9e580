"""Metrics of runs and their workers, read when Prometheus scrapes them.

The number of time series is bounded: MAX_RUNS runs (active ones first, then the newest) and MAX_WORKERS live workers of
each. Two further metrics count the runs and workers that are left out. A snapshot of a run takes a handful of queries;
the run's lock is held only to read from memory, never while the database or the disk is read.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.registry import Collector
from sqlalchemy import select
from sqlalchemy.exc import NoResultFound

from coordinator.api.metrics.families import OF_RUNS, PREFIX, Family
from coordinator.reporting import round_reports, run_reports
from coordinator.reporting.run_reports import state_of
from coordinator.run.live_run import LiveRun, Outcome
from coordinator.store.tables import CheckpointRow, RunRow, WorkerRow
from coordinator.trust.guard import has_paused
from protocol.messages import Cause, DiskBytes, Metrics, RoundInfo, RunInfo, RunState

MAX_RUNS = 50
MAX_WORKERS = 200  # of one run, by name

Value = tuple[str, tuple[str, ...], float]  # a family's name, the values of its labels, the value


def exported(runs: Iterable[LiveRun]) -> list[LiveRun]:
    """Return the runs that are exported as time series, by name."""
    first = sorted(runs, key=lambda run: (run.ended, -run.id))[:MAX_RUNS]
    return sorted(first, key=lambda run: run.name)


class RunsCollector(Collector):
    """Collects the metrics of the runs that `runs` returns."""

    def __init__(self, runs: Callable[[], Sequence[LiveRun]]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        return metrics(OF_RUNS, self._values())

    def _values(self) -> Iterator[Value]:
        runs = self._runs()
        chosen = exported(runs)
        states = Counter(map(state_of, runs))
        for state in RunState:
            yield f"{PREFIX}runs", (state,), states[state]
        yield f"{PREFIX}runs_not_shown", (), len(runs) - len(chosen)
        for run in chosen:
            try:
                yield from run_values(snapshot(run))
            except (NoResultFound, FileNotFoundError):
                continue  # the run was removed meanwhile


def metrics(families: Sequence[Family], values: Iterable[Value]) -> Iterator[Metric]:
    """Yield the families, with or without values, as metrics of Prometheus' library."""
    found: dict[str, list[Value]] = defaultdict(list)
    for value in values:
        found[value[0]].append(value)
    for family in families:
        metric = Metric(family.name.removesuffix("_total"), f"{family.meaning} ({family.unit})", family.type)
        for name, labels, number in found[family.name]:
            metric.add_sample(name, dict(zip(family.labels, labels, strict=True)), float(number))
        yield metric


# --- reading a run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSnapshot:
    """A live worker. `joins`: how often it has joined."""

    name: str
    last_seen_s: float
    metrics: Metrics
    joins: int


@dataclass(frozen=True)
class RunSnapshot:
    """A run. Ages are in seconds; None if there is no such age. `last_round`: the last published round."""

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
    workers: list[WorkerSnapshot]


def snapshot(run: LiveRun) -> RunSnapshot:
    """Read a run's state for its metrics."""
    info, now = run_reports.run_info(run), run.context.now()
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
                .limit(MAX_WORKERS)
            ).all()
        )
    with run.briefly_locked():
        clock, opening = run.context.clock(), run.open
        events, outcomes = dict(run.counters.events), dict(run.counters.outcomes)
        quarantined = len(run.members.quarantined(run.round))
    workers = [
        WorkerSnapshot(name, seen_s, run.members.metrics(name), times)
        for name, times in joins.items()
        if (seen_s := run.members.last_seen_s(name, clock)) is not None  # the lease may have ended meanwhile
    ]
    return RunSnapshot(
        info=info,
        paused_by_guard=by_guard,
        open_round_age_s=None if opening is None or run.ended else clock - opening.opened_at,
        last_round=last,
        last_round_age_s=None if last is None or last.closed_at is None else max(0.0, now - last.closed_at),
        checkpoint_age_s=None if checkpoint_at is None else max(0.0, now - checkpoint_at),
        events=events,
        outcomes=outcomes,
        quarantined=quarantined,
        disk=run_reports.disk_bytes(run),
        workers=workers,
    )


# --- the values of a snapshot (pure) ----------------------------------------------------------------------------------


def run_values(run: RunSnapshot) -> Iterator[Value]:
    """Yield the values of a run and its workers. An unknown value has no sample."""
    label = run.info.name
    for name, value in _plain(run):
        if value is not None:
            yield f"{PREFIX}run_{name}", (label,), value
    for name, second, value in _labelled(run):
        yield f"{PREFIX}run_{name}", (label, second), value
    for worker in run.workers:
        for name, found in _worker(worker, run.info.round):
            if found is not None:
                yield f"{PREFIX}worker_{name}", (label, worker.name), found


def _plain(run: RunSnapshot) -> Iterator[tuple[str, float | None]]:
    info, last = run.info, run.last_round
    yield "paused_by_guard", run.paused_by_guard
    yield "round", info.round
    yield "rounds_expected", info.rounds
    yield "step", info.step
    yield "tokens", info.tokens
    yield "live_workers", info.live_workers
    yield "quarantined_workers", run.quarantined
    yield "workers_not_shown", max(0, info.live_workers - len(run.workers))
    yield "open_round_age_seconds", run.open_round_age_s
    yield "last_round_age_seconds", run.last_round_age_s
    if last is not None and last.closed_at is not None:
        yield "last_round_duration_seconds", max(0.0, last.closed_at - last.opened_at)
        yield "last_round_tokens", last.tokens
        yield "loss", last.loss
    yield "held_out_loss", info.held_out_loss
    yield "checkpoint_age_seconds", run.checkpoint_age_s
    yield "divergences_total", info.divergences
    yield "upload_bytes_total", info.account.upload_bytes
    yield "download_bytes_total", info.account.download_bytes


def _labelled(run: RunSnapshot) -> Iterator[tuple[str, str, float]]:
    for state in RunState:
        yield "state", state, state is run.info.state
    for cause in Cause:
        yield "held_up", cause, cause is run.info.held_up_by
    for outcome in Outcome:  # also zeros: Prometheus sees an increase only from an existing value
        yield "contributions_total", outcome, run.outcomes.get(outcome, 0)
    for stage, seconds in run.info.account.seconds.items():
        yield "stage_seconds_total", stage, seconds
    for kind, count in run.events.items():
        yield "events_total", kind, count
    for kind, size in run.disk.model_dump().items():
        yield "disk_bytes", kind, size


def _worker(worker: WorkerSnapshot, round_: int) -> Iterator[tuple[str, float | None]]:
    metrics = worker.metrics
    yield "last_seen_seconds", worker.last_seen_s
    yield "rounds_behind", None if metrics.round is None else max(0, round_ - metrics.round)
    yield "tokens_per_second", metrics.tokens_per_second
    yield "inner_step", metrics.inner_step
    yield "joins_total", worker.joins
