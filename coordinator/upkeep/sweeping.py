"""The sweeping of blobs without a row: a crash came between the blob and its row, and nobody was told of it."""

import logging

from sqlalchemy import select

from coordinator.runs.live_run import LiveRun
from coordinator.store.blobs import KINDS, move, round_of
from coordinator.store.tables import CheckpointFragmentRow, ContributionRow, FragmentRow

logger = logging.getLogger(__name__)


def sweep(run: LiveRun) -> None:
    """Delete the blobs that no row knows. Deltas and checkpoints of older versions, whose names had no digest, get the
    names that they have today."""
    found = [name for kind in KINDS for name, _ in run.blobs.list(run.names.kind(kind))]
    known = _names(run, oldest=min(map(round_of, found), default=0))  # older rows are history, without blobs
    today = set(known.values())
    for name in found:
        if name not in today and name in known and known[name] not in found:
            move(run.blobs, name, known[name], run.world.data.scratch())
        elif name not in today:
            logger.info("%s: deleting %s, which was never acknowledged or published", run.name, name)
            run.blobs.delete(name)


def _names(run: LiveRun, oldest: int) -> dict[str, str]:
    """Return, of every row from round `oldest` on, the name of its blob, by the name that older versions gave it."""
    names = {}
    with run.world.database.read() as session:
        for row in session.scalars(
            select(ContributionRow).where(ContributionRow.run_id == run.id, ContributionRow.round >= oldest)
        ):
            name = run.names.contribution(row.round, row.fragment, row.worker, row.digest)
            names[name] = name
        for delta in session.scalars(
            select(FragmentRow).where(
                FragmentRow.run_id == run.id, FragmentRow.round >= oldest, FragmentRow.delta_digest.is_not(None)
            )
        ):
            older = f"{run.names.kind('deltas')}{delta.round}/{delta.fragment}"
            names[older] = run.names.delta(delta.round, delta.fragment, delta.delta_digest or b"")
        for saved in session.scalars(select(CheckpointFragmentRow).where(CheckpointFragmentRow.run_id == run.id)):
            older = f"{run.names.kind('checkpoints')}{saved.round}/{saved.fragment}"
            names[older] = run.names.checkpoint(saved.round, saved.fragment, saved.digest)
    return names
