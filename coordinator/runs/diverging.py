"""Divergence: a worker was found to hold another state than the run's. It is told, counted, and never averaged."""

from coordinator.runs.live_run import LiveRun, worker_row


def note(run: LiveRun, worker: str, round_: int, fragment: int) -> None:
    """Count it once per worker and round, whatever the number of fragments. Holds the lock."""
    if run.diverged.get(worker) == round_:
        return
    with run.world.database.write() as session:
        run.row(session).divergences += 1
        worker_row(run, session, worker).divergences += 1
        message = f"{worker} holds another state {round_} of fragment {fragment} than the run; it resyncs"
        run.record(session, "diverged", message, worker=worker, round=round_, fragment=fragment)
    run.diverged[worker] = round_
