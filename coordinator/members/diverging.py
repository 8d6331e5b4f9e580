"""Divergence: a worker holds another state than the run's. It is refused, counted, and never averaged."""

from functools import partial

from coordinator.runs.live_run import LiveRun


def record(run: LiveRun, worker: str, round_: int, fragment: int) -> None:
    """Record a divergence, once per worker and round, however many fragments differ. Under the run's lock."""
    opening = run.open
    if opening is None or worker in opening.diverged:
        return
    with run.change() as change:
        change.row.divergences += 1
        change.worker_row(worker).divergences += 1
        message = f"{worker} holds another state {round_} of fragment {fragment} than the run; it resyncs"
        change.record("diverged", message, worker=worker, round=round_, fragment=fragment)
        change.then(partial(opening.diverged.add, worker))
