"""The values of the metrics, from what was seen. Pure."""

from collections.abc import Iterator

from coordinator.metrics.families import PREFIX
from coordinator.metrics.seeing import SeenRun, SeenWorker
from coordinator.run.live_run import Outcome
from protocol.messages import Cause, RunState

Value = tuple[str, tuple[str, ...], float]  # the name of a family, the values of its labels, the value


def of_run(seen: SeenRun) -> Iterator[Value]:
    """Yield the values of a run and its workers; nothing for what is not known of it."""
    run = seen.info.name
    for name, value in _plain(seen):
        if value is not None:
            yield f"{PREFIX}run_{name}", (run,), value
    for name, label, value in _labelled(seen):
        yield f"{PREFIX}run_{name}", (run, label), value
    for worker in seen.workers:
        for name, found in _worker(worker, seen.info.round):
            if found is not None:
                yield f"{PREFIX}worker_{name}", (run, worker.name), found


def _plain(seen: SeenRun) -> Iterator[tuple[str, float | None]]:
    info, last = seen.info, seen.last_round
    yield "paused_by_guard", seen.paused_by_guard
    yield "round", info.round
    yield "rounds_expected", info.rounds
    yield "step", info.step
    yield "tokens", info.tokens
    yield "live_workers", info.live_workers
    yield "quarantined_workers", seen.quarantined
    yield "workers_not_shown", max(0, info.live_workers - len(seen.workers))
    yield "open_round_age_seconds", seen.open_round_age_s
    yield "last_round_age_seconds", seen.last_round_age_s
    if last is not None and last.closed_at is not None:
        yield "last_round_duration_seconds", max(0.0, last.closed_at - last.opened_at)
        yield "last_round_tokens", last.tokens
        yield "loss", last.loss
    yield "held_out_loss", info.held_out_loss
    yield "checkpoint_age_seconds", seen.checkpoint_age_s
    yield "divergences_total", info.divergences
    yield "upload_bytes_total", info.account.upload_bytes
    yield "download_bytes_total", info.account.download_bytes


def _labelled(seen: SeenRun) -> Iterator[tuple[str, str, float]]:
    for state in RunState:
        yield "state", state, state is seen.info.state
    for cause in Cause:
        yield "held_up", cause, cause is seen.info.held_up_by
    for outcome in Outcome:  # all of them, as an increase is seen only from a value that was there
        yield "contributions_total", outcome, seen.outcomes.get(outcome, 0)
    for stage, seconds in seen.info.account.seconds.items():
        yield "stage_seconds_total", stage, seconds
    for kind, count in seen.events.items():
        yield "events_total", kind, count
    for kind, size in seen.disk.model_dump().items():
        yield "disk_bytes", kind, size


def _worker(worker: SeenWorker, round_: int) -> Iterator[tuple[str, float | None]]:
    metrics = worker.metrics
    yield "last_seen_seconds", worker.last_seen_s
    yield "rounds_behind", None if metrics.round is None else max(0, round_ - metrics.round)
    yield "tokens_per_second", metrics.tokens_per_second
    yield "inner_step", metrics.inner_step
    yield "joins_total", worker.joins
