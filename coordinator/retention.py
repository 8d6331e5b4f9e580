"""What is deleted, and when: nothing that a checkpoint does not cover.

The newest `checkpoints.keep` checkpoints stay, and every delta from the oldest of them on, so a worker can always come
from there to the present; the delta that led to the newest one stays in any case, for workers are just fetching it.
Contributions go once the newest checkpoint covers them. Rows stay: they are the history.
"""

from sqlalchemy import delete, select

from coordinator.live_run import LiveRun
from coordinator.tables import CheckpointFragmentRow, CheckpointRow


def kept_checkpoints(run: LiveRun) -> list[int]:
    """The complete checkpoints, newest first."""
    with run.world.database.read() as session:
        return list(
            session.scalars(
                select(CheckpointRow.round).where(CheckpointRow.run_id == run.id).order_by(CheckpointRow.round.desc())
            )
        )


def clean(run: LiveRun) -> None:
    """Delete what the rule no longer keeps; rows of checkpoints first, so that no row names a missing file."""
    rounds = kept_checkpoints(run)
    kept, dropped = rounds[: run.spec.checkpoints.keep], rounds[run.spec.checkpoints.keep :]
    if dropped:
        with run.world.database.write() as session:
            for table in (CheckpointRow, CheckpointFragmentRow):
                session.execute(delete(table).where(table.run_id == run.id, table.round.in_(dropped)))
    first_delta = min(kept[-1], kept[0] - 1)
    for folder, before in (("checkpoints", kept[-1]), ("deltas", first_delta), ("contributions", kept[0])):
        for round_ in run.files.rounds(folder):
            if round_ < before:
                run.files.remove_round(folder, round_)
