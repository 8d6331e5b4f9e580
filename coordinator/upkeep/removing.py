"""Removing a run that has ended, with all its rows and files.

First a marker blob becomes durable. Then the rows are deleted in one transaction, then the blobs, and last the marker.
A crash before the transaction leaves the run as it was. A crash after it leaves a marker without rows, and the next
start finishes the removal. Blobs of a run that has neither rows nor a marker are kept: a database restored from a
backup may be older than the run.
"""

from collections.abc import Collection

from sqlalchemy import delete

from coordinator.run.live_run import LiveRun, RunContext
from coordinator.store.blobs import REMOVED, RunNames
from coordinator.store.identity import Actor, audit_note
from coordinator.store.tables import Base, RunRow, TokenRow
from outerstep.common.quantities import natural
from protocol.errors import Problem

_BUSY_S = 1.0


def remove_rows(run: LiveRun, by: Actor, *, verifying: bool) -> None:
    """Remove the run from the database. Nothing can change the run afterwards. Call it under the run's lock, and then
    call `remove_blobs`.

    Raises Problem: run-not-ended; not-ready, if workers are leaving or a job is working on the run's files.
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
        for table in reversed(Base.metadata.sorted_tables):  # delete rows that refer to other rows first
            if "run_id" in table.columns:
                session.execute(delete(table).where(table.columns["run_id"] == run.id))
        session.execute(delete(RunRow).where(RunRow.id == run.id))
        session.execute(delete(TokenRow).where(TokenRow.run == run.name))
        message = f"removed the run {run.name}, with the tokens for it alone"
        audit_note(session, run.context.now(), by, "run-removed", message, run.name)
    run.removed()


def remove_blobs(context: RunContext, name: str) -> None:
    """Remove all files of a run whose rows are deleted, after a backup that does not have it."""
    names = RunNames(name)
    context.back_up(alone=True)
    context.blobs.delete(*(blob for blob, _ in context.blobs.list(names.all) if blob != names.removed))
    context.data.forget(name)
    context.blobs.delete(names.removed)


def finish(context: RunContext, runs: Collection[str]) -> None:
    """Finish the removals that an earlier process has begun. `runs`: the names of the runs in the database."""
    for blob, _ in list(context.blobs.list("runs/")):
        _, name, *rest = blob.split("/")
        if rest == [REMOVED]:
            if name in runs:
                context.blobs.delete(blob)
            else:
                remove_blobs(context, name)
