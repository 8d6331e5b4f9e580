"""What happens to files that are newer than the database, because it was restored from a backup.

The database decides: the run goes on from its round. Files of later rounds belong to a history that it does not have;
they are moved to `set-aside/`, where the operator may inspect or delete them. Workers that are ahead are told to
recover the run's state when they ask for an assignment.
"""

import itertools

from sqlalchemy import select

from coordinator.runs.live_run import LiveRun
from coordinator.runs.units import return_units
from coordinator.store.files import fsync
from coordinator.store.tables import WorkerRow
from protocol.messages import WorkerState

# Without a restored backup no file is of a later round than the run's: a round is in the database before its files.
FOLDERS = ("contributions", "deltas", "checkpoints")


def set_aside_newer(run: LiveRun) -> None:
    """Move the files of rounds that the database does not have to `set-aside/`, and record it as an event."""
    newer = [(folder, round_) for folder in FOLDERS for round_ in run.files.rounds(folder) if round_ > run.round]
    if not newer:
        return
    latest = max(round_ for _, round_ in newer)
    with run.change() as change:  # first: then a crash in between only repeats this
        message = (
            f"the database is older than the files (it knows {run.round} rounds, there are files of round {latest}): "
            f"it was restored from a backup. The run goes on from round {run.round}; the newer files were moved to "
            f"{run.files.root / 'set-aside'}, and every worker joins again"
        )
        change.record("restored-from-backup", message, round=run.round, files_of_round=latest)
        live = change.session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.state == WorkerState.LIVE)
        ).all()
        for row in live:  # their tokens are of a history that is gone, and their names must not be taken
            row.state, row.token_hash = WorkerState.LOST, None
            return_units(change.session, run.id, row.name)
    aside = run.files.root / "set-aside"
    aside.mkdir(exist_ok=True)
    place = next(aside / str(n) for n in itertools.count() if not (aside / str(n)).exists())
    for folder, round_ in newer:
        (place / folder).mkdir(parents=True, exist_ok=True)
        (run.files.root / folder / str(round_)).rename(place / folder / str(round_))
    for folder in FOLDERS:
        fsync(run.files.root / folder)
