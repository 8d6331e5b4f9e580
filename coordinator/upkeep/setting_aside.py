"""What happens to blobs that are newer than the database, because it was restored from a backup.

The database decides: the run goes on from its round. Blobs of later rounds belong to a history that it does not have;
they get names under `set-aside/`, where the operator may inspect or delete them. Workers that are ahead are told to
recover the run's state when they ask for an assignment.
"""

from sqlalchemy import select

from coordinator.runs.live_run import LiveRun
from coordinator.runs.units import return_units
from coordinator.store.blobs import KINDS, move, round_of
from coordinator.store.tables import WorkerRow
from protocol.messages import WorkerState


def set_aside_newer(run: LiveRun) -> None:
    """Move the blobs of rounds that the database does not have to `set-aside/`, and record it as an event."""
    # Without a restored backup no blob is of a later round than the run's: a round is in the database before its blobs.
    names = (name for kind in KINDS for name, _ in run.blobs.list(run.names.kind(kind)))
    newer = [name for name in names if round_of(name) > run.round]
    if not newer:
        return
    earlier = {
        int(name.removeprefix(run.names.set_aside).split("/")[0]) for name, _ in run.blobs.list(run.names.set_aside)
    }
    place = f"{run.names.set_aside}{max(earlier, default=-1) + 1}/"
    latest = max(map(round_of, newer))
    with run.change() as change:  # first: then a crash in between only repeats this
        message = (
            f"the database is older than the files (it knows {run.round} rounds, there are files of round {latest}): "
            f"it was restored from a backup. The run goes on from round {run.round}; the newer files were moved to "
            f"{place}, and every worker joins again"
        )
        change.record("restored-from-backup", message, round=run.round, files_of_round=latest)
        live = change.session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.state == WorkerState.LIVE)
        ).all()
        for row in live:  # their tokens are of a history that is gone, and their names must not be taken
            row.state, row.token_hash = WorkerState.LOST, None
            return_units(change.session, run.id, row.name)
    for name in newer:
        move(run.blobs, name, place + name.removeprefix(f"runs/{run.name}/"), run.world.data.scratch())
