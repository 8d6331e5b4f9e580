"""The removal of a run that has ended, with all its rows and files.

First a mark becomes durable among the run's blobs, then its rows go in one transaction, then its blobs, and the mark
last. A crash before the rows have gone leaves the run as it was, a crash afterwards a mark without rows, which the next
start goes on from. Blobs of a run that has neither rows nor a mark stay: a database restored from a backup may be older
than the run.
"""

from collections.abc import Collection

from sqlalchemy import delete

from coordinator.run.live_run import LiveRun, RunContext
from coordinator.store import audit
from coordinator.store.blobs import REMOVED, RunNames
from coordinator.store.identity import Actor
from coordinator.store.tables import Base, RunRow, TokenRow
from outerstep.common.quantities import natural
from protocol.errors import Problem

_BUSY_S = 1.0


def remove_rows(run: LiveRun, by: Actor, *, verifying: bool) -> None:
    """Remove the run from the database, after which nothing changes it any more; `remove_blobs` is to follow. Under the
    run's lock.

    Raises Problem: run-not-ended; not-ready where work on it is still under way.
    """
    if not run.ended:
        raise Problem("run-not-ended", f"the run {run.name} is {run.state}; stop it first, or wait for its end")
    if len(run.members):
        names = ", ".join(sorted(run.members.live(), key=natural))
        raise Problem("not-ready", f"workers are still leaving the run {run.name}: {names}", retry_after_s=_BUSY_S)
    if verifying or run.outer.any_job_running:
        raise Problem("not-ready", f"files of the run {run.name} are still being worked on", retry_after_s=_BUSY_S)
    run.blobs.put(run.names.removed, b"")
    with run.context.database.write() as session:
        for table in reversed(Base.metadata.sorted_tables):  # rows that refer to others first
            if "run_id" in table.columns:
                session.execute(delete(table).where(table.columns["run_id"] == run.id))
        session.execute(delete(RunRow).where(RunRow.id == run.id))
        session.execute(delete(TokenRow).where(TokenRow.run == run.name))
        message = f"removed the run {run.name}, with the tokens for it alone"
        audit.note(session, run.context.now(), by, "run-removed", message, run.name)
    run.removed()


def remove_blobs(context: RunContext, name: str) -> None:
    """Remove all files of a run whose rows have gone."""
    names = RunNames(name)
    for blob, _ in list(context.blobs.list(names.all)):
        if blob != names.removed:
            context.blobs.delete(blob)
    context.data.forget(name)
    context.blobs.delete(names.removed)


def finish(context: RunContext, runs: Collection[str]) -> None:
    """Go on where an earlier process ended in the middle of a removal. `runs`: those that the database has."""
    for blob, _ in list(context.blobs.list("runs/")):
        _, name, *rest = blob.split("/")
        if rest == [REMOVED]:
            if name in runs:
                context.blobs.delete(blob)
            else:
                remove_blobs(context, name)
