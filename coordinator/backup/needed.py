"""What a backup has to hold: read from the copy of the database alone.

Needed are the checkpoints, every delta from the oldest of them on, and the contributions that are in no delta yet.
Those that are in one are left out, though the coordinator has them until the next checkpoint: they are most of all
bytes, and of use only to make a delta again that the disk has spoilt, which a backup knows by its digest.
"""

from pathlib import Path

from sqlalchemy import URL, Connection, create_engine, select
from sqlalchemy.exc import DBAPIError

from coordinator.backup.manifest import Blob, RunSummary
from coordinator.store.blobs import RunNames
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, ContributionRow, FragmentRow, RunRow
from coordinator.sync.retention import first_delta
from protocol.errors import OuterstepError
from protocol.messages import FragmentState


def needed(database: Path) -> tuple[list[RunSummary], list[Blob]]:
    """Return the runs of a copied database, and the blobs that they need, those first that are deleted soonest.

    Raises OuterstepError for a database that is none of a coordinator's.
    """
    engine = create_engine(URL.create("sqlite", database=str(database)))
    try:
        with engine.connect() as connection:
            runs = connection.execute(
                select(RunRow.id, RunRow.name, RunRow.state, RunRow.round).order_by(RunRow.name)
            ).all()
            ids = {id_: RunNames(name) for id_, name, *_ in runs}
            blobs = [
                *(blob for id_, names in ids.items() for blob in _contributions(connection, id_, names)),
                *(blob for id_, names in ids.items() for blob in _deltas(connection, id_, names)),
                *(blob for id_, names in ids.items() for blob in _checkpoints(connection, id_, names)),
            ]
    except DBAPIError as error:
        raise OuterstepError(f"this is no database of a coordinator: {error.orig}") from error
    finally:
        engine.dispose()
    return [RunSummary(name=name, state=state, round=round_) for _, name, state, round_ in runs], blobs


def _contributions(connection: Connection, run_id: int, names: RunNames) -> list[Blob]:
    row, fragment = ContributionRow, FragmentRow
    same = (fragment.run_id == row.run_id) & (fragment.round == row.round) & (fragment.fragment == row.fragment)
    rows = connection.execute(
        select(row.round, row.fragment, row.worker, row.digest, row.size)
        .join(fragment, same)
        .where(row.run_id == run_id, fragment.state != FragmentState.PUBLISHED)
        .order_by(row.round, row.fragment, row.worker)
    )
    return [
        Blob(name=names.contribution(round_, index, worker, digest), digest=digest.hex(), size=size)
        for round_, index, worker, digest, size in rows
    ]


def _deltas(connection: Connection, run_id: int, names: RunNames) -> list[Blob]:
    # Every complete checkpoint that has a row, also one that is about to be deleted: rows go first, so at the moment
    # of the copy it was there, and so were the deltas after it.
    kept = list(
        connection.scalars(
            select(CheckpointRow.round).where(CheckpointRow.run_id == run_id).order_by(CheckpointRow.round.desc())
        )
    )
    row = FragmentRow
    rows = connection.execute(
        select(row.round, row.fragment, row.delta_digest, row.delta_bytes)
        .where(row.run_id == run_id, row.delta_digest.is_not(None), row.round >= (first_delta(kept) if kept else 0))
        .order_by(row.round, row.fragment)
    )
    return [
        Blob(name=names.delta(round_, index, digest), digest=digest.hex(), size=size)
        for round_, index, digest, size in rows
        if digest is not None
    ]


def _checkpoints(connection: Connection, run_id: int, names: RunNames) -> list[Blob]:
    row = CheckpointFragmentRow
    rows = connection.execute(
        select(row.round, row.fragment, row.digest, row.size)
        .where(row.run_id == run_id)
        .order_by(row.round, row.fragment)
    )
    return [
        Blob(name=names.checkpoint(round_, index, digest), digest=digest.hex(), size=size)
        for round_, index, digest, size in rows
    ]
