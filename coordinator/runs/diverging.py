"""Divergence: a worker holds another state than the run's. It is refused, counted, and never averaged."""

from functools import partial

from coordinator.runs.live_run import LiveRun
from coordinator.runs.open_round import OpenRound


def record(run: LiveRun, opening: OpenRound, worker: str, fragment: int) -> None:
    """Record a divergence, once per worker and round, however many fragments differ."""
    with run.lock:
        if worker in opening.diverged:
            return
        with run.change() as change:
            change.row.divergences += 1
            change.worker_row(worker).divergences += 1
            message = f"{worker} holds another state {opening.number} of fragment {fragment} than the run; it resyncs"
            change.record("diverged", message, worker=worker, round=opening.number, fragment=fragment)
            change.then(partial(opening.diverged.add, worker))
