"""The sweeping of blobs without a row: a crash came between the blob and its row, and nobody was told of it."""

import logging
from collections.abc import Callable

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.blobs import Kind, move, round_of
from coordinator.store.tables import CheckpointFragmentRow, ContributionRow, FragmentRow

logger = logging.getLogger(__name__)


def sweep(run: LiveRun) -> None:
    """Delete the blobs that no row knows. Deltas and checkpoints of older versions, whose names had no digest, get the
    names that they have today."""
    for kind, names_of in _NAMES.items():
        found = {name for name, _ in run.blobs.list(run.names.kind(kind))}
        if not found:
            continue
        with run.world.database.read() as session:
            known = names_of(run, session, min(map(round_of, found)))  # older rows are history, without blobs
        today = set(known.values())
        for name in found - today:
            if name in known and known[name] not in found:
                move(run.blobs, name, known[name], run.world.data.scratch())
            else:
                logger.info("%s: deleting %s, which was never acknowledged or published", run.name, name)
                run.blobs.delete(name)


def _contributions(run: LiveRun, session: Session, oldest: int) -> dict[str, str]:
    """Return, of every row from round `oldest` on, the name of its blob, by the name that older versions gave it."""
    rows = session.scalars(
        select(ContributionRow).where(ContributionRow.run_id == run.id, ContributionRow.round >= oldest)
    )
    names = [run.names.contribution(row.round, row.fragment, row.worker, row.digest) for row in rows]
    return dict(zip(names, names, strict=True))


def _deltas(run: LiveRun, session: Session, oldest: int) -> dict[str, str]:
    rows = session.scalars(
        select(FragmentRow).where(
            FragmentRow.run_id == run.id, FragmentRow.round >= oldest, FragmentRow.delta_digest.is_not(None)
        )
    )
    return {
        f"{run.names.kind('deltas')}{row.round}/{row.fragment}": run.names.delta(
            row.round, row.fragment, row.delta_digest or b""
        )
        for row in rows
    }


def _checkpoints(run: LiveRun, session: Session, oldest: int) -> dict[str, str]:
    rows = session.scalars(
        select(CheckpointFragmentRow).where(
            CheckpointFragmentRow.run_id == run.id, CheckpointFragmentRow.round >= oldest
        )
    )
    return {
        f"{run.names.kind('checkpoints')}{row.round}/{row.fragment}": run.names.checkpoint(
            row.round, row.fragment, row.digest
        )
        for row in rows
    }


_NAMES: dict[Kind, Callable[[LiveRun, Session, int], dict[str, str]]] = {
    "contributions": _contributions,
    "deltas": _deltas,
    "checkpoints": _checkpoints,
}
