"""The sweeping of blobs without a row: a crash came between the blob and its row, and nobody was told of it."""

import logging
from collections.abc import Callable

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.blobs import Kind, round_of
from coordinator.store.tables import CheckpointFragmentRow, ContributionRow, FragmentRow
from coordinator.sync import retention

logger = logging.getLogger(__name__)


def sweep(run: LiveRun) -> None:
    """Delete the blobs that no row names, and those that the retention rule does not keep: after a crash their rows may
    outlive them, or they their rows."""
    first_rounds = retention.oldest_kept(run)
    for kind, names_of in _NAMES.items():
        found = {name for name, _ in run.blobs.list(run.names.kind(kind))}
        if not found:
            continue
        with run.context.database.read() as session:
            oldest = max(min(map(round_of, found)), first_rounds.get(kind, 0))  # older rows are history, without blobs
            known = names_of(run, session, oldest)
        for name in found - known:
            logger.info("%s: deleting %s, which is not needed", run.name, name)
            run.blobs.delete(name)


def _contributions(run: LiveRun, session: Session, oldest: int) -> set[str]:
    """Return the names of the blobs of every row from round `oldest` on."""
    row = ContributionRow
    rows = session.execute(
        select(row.round, row.fragment, row.worker, row.digest).where(row.run_id == run.id, row.round >= oldest)
    )
    return {run.names.contribution(*each) for each in rows}


def _deltas(run: LiveRun, session: Session, oldest: int) -> set[str]:
    row = FragmentRow
    rows = session.execute(
        select(row.round, row.fragment, row.delta_digest).where(
            row.run_id == run.id, row.round >= oldest, row.delta_digest.is_not(None)
        )
    )
    return {run.names.delta(round_, fragment, digest or b"") for round_, fragment, digest in rows}


def _checkpoints(run: LiveRun, session: Session, oldest: int) -> set[str]:
    row = CheckpointFragmentRow
    rows = session.execute(select(row.round, row.fragment, row.digest).where(row.run_id == run.id, row.round >= oldest))
    return {run.names.checkpoint(*each) for each in rows}


_NAMES: dict[Kind, Callable[[LiveRun, Session, int], set[str]]] = {
    "contributions": _contributions,
    "deltas": _deltas,
    "checkpoints": _checkpoints,
}
