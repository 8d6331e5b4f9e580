"""Restoring a run after a start: rebuild it in memory from the database, and delete blobs that nothing needs.

Nothing acknowledged is lost, because every contribution and delta has a row, and every row a durable blob. Every live
worker gets a new lease for a full term, however long the coordinator was down.
"""

import logging
from collections.abc import Callable

from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from coordinator.aggregation.tasks import NOT_LATE, Lateness
from coordinator.rounds.opening import fastest_rate
from coordinator.run.live_run import LiveRun
from coordinator.run.open_round import AcceptedContribution, OpenFragment, OpenRound
from coordinator.run.schedule import round_steps
from coordinator.store.blobs import Kind, round_of
from coordinator.store.tables import (
    AssignmentRow,
    CheckpointFragmentRow,
    ContributionRow,
    FragmentRow,
    RoundRow,
    WorkerRow,
)
from coordinator.sync import outer_state, retention
from coordinator.trust import quarantine
from coordinator.upkeep import redoing, rolling_back
from protocol.messages import FragmentState, Metrics, WorkerState

logger = logging.getLogger(__name__)


def restore_owners(run: LiveRun) -> None:
    """Restore whose token each worker joined with. The retention rule depends on it, so this comes first."""
    with run.context.database.read() as session:
        owners = session.execute(select(WorkerRow.name, WorkerRow.token).where(WorkerRow.run_id == run.id)).all()
    for name, token in owners:
        run.members.record_owner(name, token)


def restore(run: LiveRun, needed: frozenset[str] = frozenset()) -> None:
    """Rebuild the run in memory, then let it settle. The rows that the retention rule does not keep are deleted
    already, and `restore_owners` was called before that. `needed`: the names of blobs that backups need; they stay."""
    with run.lock:
        rolling_back.set_aside_newer(run)
        rolling_back.note_set_aside(run)
        rolling_back.rejoin_if_restored(run)
        _restore_workers(run)
        opening = _open_round(run)
        sweep(run, needed)
        if run.model is not None:
            outer_state.restore(run)
        redoing.restore(run)
        run.restored(opening)


def _restore_workers(run: LiveRun) -> None:
    now = run.context.clock()
    with run.context.database.read() as session:
        rows = session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.state == WorkerState.LIVE)
        ).all()
        quarantine.restore(session, run)
        previous = session.scalars(
            select(AssignmentRow.worker).where(AssignmentRow.run_id == run.id, AssignmentRow.round == run.round - 1)
        )
        run.members.end_round(set(previous))
    for row in rows:
        assert row.token_hash is not None, "a live worker holds a lease"
        metrics = Metrics.model_validate(row.metrics)
        run.members.join(row.name, row.token_hash, now, metrics, row.token, proven=bool(row.contributions))
    _restore_step_rates(run)


def _restore_step_rates(run: LiveRun) -> None:
    """Restore the workers' observed rates from the steps of their last contributions. When each of them arrived is not
    known after a restart, so all took as long as the round."""
    steps = select(ContributionRow.worker, func.max(ContributionRow.tokens)).group_by(ContributionRow.worker)
    with run.context.database.read() as session:
        rows = session.execute(
            steps.where(ContributionRow.run_id == run.id, ContributionRow.round == run.round - 1)
        ).all()
        last = session.get(RoundRow, (run.id, run.round - 1))
    if last is not None and last.closed_at is not None:
        seconds = last.closed_at - last.opened_at
        run.step_rates.observe({worker: (tokens // run.unit_tokens(worker), seconds) for worker, tokens in rows})


def _open_round(run: LiveRun) -> OpenRound | None:
    with run.context.database.read() as session:
        if session.get(RoundRow, (run.id, run.round)) is None:
            return None
        fragments = session.scalars(
            select(FragmentRow)
            .where(FragmentRow.run_id == run.id, FragmentRow.round == run.round)
            .order_by(FragmentRow.fragment)
        ).all()
        assigned = session.scalars(
            select(AssignmentRow.worker).where(AssignmentRow.run_id == run.id, AssignmentRow.round == run.round)
        ).all()
        contributions = session.scalars(
            select(ContributionRow).where(ContributionRow.run_id == run.id, ContributionRow.round == run.round)
        ).all()
    opening = OpenRound(
        run.round,
        run.step,
        round_steps(run),
        run.context.clock(),
        set(assigned),
        [
            OpenFragment(state=FragmentState(row.state), reason=row.reason, weights=row.contributors or {})
            for row in fragments
        ],
        fastest_rate(run),
    )
    for row in contributions:
        lateness = NOT_LATE if row.lateness is None else Lateness(*row.lateness)
        accepted = AcceptedContribution(row.tokens, row.digest, sha256=row.sha256, lateness=lateness)
        opening.fragments[row.fragment].contributed[row.worker] = accepted
    return opening


# --- blobs that nothing needs -----------------------------------------------------------------------------------------


def sweep(run: LiveRun, needed: frozenset[str]) -> None:
    """Delete the blobs that no row names, because a crash may come between a blob and its row. Also delete those that
    the retention rule does not keep. Those that backups need stay."""
    first_rounds = retention.oldest_kept(run)
    for kind, names_of in _NAMES.items():
        found = {name for name, _ in run.blobs.list(run.names.kind(kind))}
        if not found:
            continue
        with run.context.database.read() as session:
            oldest = max(min(map(round_of, found)), first_rounds.get(kind, 0))  # older rows have no blobs
            known = names_of(run, session, oldest)
        unneeded = found - known - needed
        for name in unneeded:
            logger.info("%s: deleting %s, which is not needed", run.name, name)
        run.blobs.delete(*unneeded)


def _contributions(run: LiveRun, session: Session, oldest: int) -> set[str]:
    """Return the names of the blobs in the rows from round `oldest` on."""
    row = ContributionRow
    rows = session.execute(
        select(row.round, row.fragment, row.worker, row.digest).where(row.run_id == run.id, row.round >= oldest)
    )
    return {run.names.contribution(*each) for each in rows}


def _deltas(run: LiveRun, session: Session, oldest: int) -> set[str]:
    return _of_fragments(run, session, oldest, FragmentRow.delta_digest, run.names.delta)


def _residuals(run: LiveRun, session: Session, oldest: int) -> set[str]:
    return _of_fragments(run, session, oldest, FragmentRow.residual_digest, run.names.residual)


def _of_fragments(
    run: LiveRun,
    session: Session,
    oldest: int,
    digest: InstrumentedAttribute[bytes | None],
    name: Callable[[int, int, bytes], str],
) -> set[str]:
    row = FragmentRow
    rows = session.execute(
        select(row.round, row.fragment, digest).where(row.run_id == run.id, row.round >= oldest, digest.is_not(None))
    )
    return {name(round_, fragment, found or b"") for round_, fragment, found in rows}


def _checkpoints(run: LiveRun, session: Session, oldest: int) -> set[str]:
    row = CheckpointFragmentRow
    rows = session.execute(select(row.round, row.fragment, row.digest).where(row.run_id == run.id, row.round >= oldest))
    return {run.names.checkpoint(*each) for each in rows}


_NAMES: dict[Kind, Callable[[LiveRun, Session, int], set[str]]] = {
    "contributions": _contributions,
    "deltas": _deltas,
    "checkpoints": _checkpoints,
    "residuals": _residuals,
}
