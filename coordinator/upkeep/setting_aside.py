"""What happens to blobs that are newer than the database, because it was restored from a backup or the run rolled back.

The database decides: the run goes on from its round. Blobs of later rounds belong to a history that it does not have;
they get names under `set-aside/`, where the operator may inspect or delete them. Workers that are ahead are told to
recover the run's state when they ask for an assignment.
"""

from sqlalchemy import select

from coordinator.run.live_run import Change, LiveRun
from coordinator.store.blobs import KINDS, Kind, move, round_of
from coordinator.store.tables import RoundRow, RunRow, WorkerRow
from coordinator.units.ledger import return_units
from protocol.messages import WorkerState


def set_aside_newer(run: LiveRun) -> None:
    """Move the blobs of rounds that the database does not have to `set-aside/`, and record it as an event."""
    # Without a restored backup no blob is of a later round than the run's: a round is in the database before its blobs.
    names = (name for kind in KINDS for name, _ in run.blobs.list(run.names.kind(kind)))
    newer = [name for name in names if round_of(name) > run.round]
    if not newer:
        return
    latest = max(map(round_of, newer))
    if (place := _place_of_rollback(run, latest)) is not None:
        set_aside(run, run.round, place)
        return
    place = next_place(run)
    with run.change() as change:  # first: then a crash in between only repeats this
        message = (
            f"the database is older than the files (it knows {run.round} rounds, there are files of round {latest}): "
            f"it was restored from a backup. The run goes on from round {run.round}; the newer files were moved to "
            f"{place}, and every worker joins again"
        )
        change.record("restored-from-backup", message, round=run.round, files_of_round=latest)
        _end_leases(change)
    _move(run, newer, place)


def begin_again_if_restored(run: LiveRun) -> None:
    """Where the data directory was restored from a backup, have every worker join again, and record it as an event.

    There are no newer blobs then to tell it by, and yet workers may be ahead.
    """
    if (backup := run.context.data.restored) is None:
        return
    with run.change() as change:
        message = f"{backup} was restored. The run goes on from round {run.round}, and every worker joins again"
        change.record("restored-from-backup", message, round=run.round, files_of_round=run.round)
        _end_leases(change)


def _end_leases(change: Change) -> None:
    run = change.run
    live = change.session.scalars(
        select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.state == WorkerState.LIVE)
    ).all()
    for row in live:  # their tokens are of a history that is gone, and their names must not be taken
        row.state, row.token_hash = WorkerState.LOST, None
        return_units(change.session, run.id, row.name)


def next_place(run: LiveRun) -> str:
    """Return an unused place for what is set aside, a name that ends with `/`."""
    earlier = {
        int(name.removeprefix(run.names.set_aside).split("/")[0]) for name, _ in run.blobs.list(run.names.set_aside)
    }
    return f"{run.names.set_aside}{max(earlier, default=-1) + 1}/"


def set_aside(run: LiveRun, state: int, place: str) -> None:
    """Move to `place` what is newer than the run's state `state`: its checkpoints after it, and all that its round and
    later ones have sent."""
    first: dict[Kind, int] = {"checkpoints": state + 1, "contributions": state, "deltas": state}
    newer = [
        name
        for kind, round_ in first.items()
        for name, _ in run.blobs.list(run.names.kind(kind))
        if round_of(name) >= round_
    ]
    _move(run, newer, place)


def _move(run: LiveRun, names: list[str], place: str) -> None:
    for name in names:
        move(run.blobs, name, place + name.removeprefix(run.names.all), run.context.data.scratch())


def _place_of_rollback(run: LiveRun, latest: int) -> str | None:
    """Return where a roll-back, after which no round was opened yet, wanted the blobs of rounds up to `latest`; None
    where there was none: a crash came before it had moved all of them."""
    with run.context.database.read() as session:
        last = session.get_one(RunRow, run.id).rolled_back
        if last is None or last["round"] != run.round or latest > last["from_round"]:
            return None
        opened = session.get(RoundRow, (run.id, run.round)) is not None
    return None if opened else last["place"]
