"""The restoring of a run after a start: it is rebuilt in memory from the database and goes on where it was.

Nothing acknowledged is lost: every contribution and delta has a row, and every row a durable blob. Every live worker
gets a full new lease, because it is not the workers' fault how long the coordinator was away.
"""

import math

from sqlalchemy import func, select

from coordinator.run.live_run import LiveRun
from coordinator.run.open_round import AcceptedContribution, OpenFragment, OpenRound
from coordinator.run.steps import round_steps
from coordinator.store.tables import AssignmentRow, ContributionRow, FragmentRow, RoundRow, WorkerRow
from coordinator.sync import outer_state, retention
from coordinator.trust import quarantine
from coordinator.upkeep import setting_aside, sweeping
from protocol.messages import FragmentState, Metrics, WorkerState


def restore(run: LiveRun) -> None:
    """Rebuild the run in memory and let it settle."""
    with run.lock:
        setting_aside.set_aside_newer(run)
        setting_aside.begin_again_if_restored(run)
        _restore_workers(run)
        opening = _open_round(run)
        retention.forget(run)  # or rows would name blobs that are swept next
        sweeping.sweep(run)
        if run.model is not None:
            outer_state.restore(run)
        run.restored(opening)


def _restore_workers(run: LiveRun) -> None:
    now = run.world.clock()
    with run.world.database.read() as session:
        rows = session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.state == WorkerState.LIVE)
        ).all()
        owners = session.execute(select(WorkerRow.name, WorkerRow.token).where(WorkerRow.run_id == run.id)).all()
        quarantine.restore(session, run)
        previous = session.scalars(
            select(AssignmentRow.worker).where(AssignmentRow.run_id == run.id, AssignmentRow.round == run.round - 1)
        )
        run.members.end_round(set(previous))
    for name, token in owners:
        run.members.own(name, token)
    for row in rows:
        assert row.token_hash is not None, "only who holds no lease has none"
        metrics = Metrics.model_validate(row.metrics)
        run.members.join(row.name, row.token_hash, now, metrics, row.token, proven=bool(row.contributions))
    _restore_paces(run)


def _restore_paces(run: LiveRun) -> None:
    """Let every worker have as many steps again as it has contributed to the last round: how long they took is not
    known any more."""
    steps = select(ContributionRow.worker, func.max(ContributionRow.tokens)).group_by(ContributionRow.worker)
    with run.world.database.read() as session:
        rows = session.execute(
            steps.where(ContributionRow.run_id == run.id, ContributionRow.round == run.round - 1)
        ).all()
    seen = {worker: (tokens // run.spec.unit_tokens, math.inf) for worker, tokens in rows}
    run.paces.see(seen, run.members.claimed_paces())


def _open_round(run: LiveRun) -> OpenRound | None:
    with run.world.database.read() as session:
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
        run.world.clock(),
        set(assigned),
        [
            OpenFragment(state=FragmentState(row.state), reason=row.reason, weights=row.contributors or {})
            for row in fragments
        ],
    )
    for row in contributions:
        opening.fragments[row.fragment].contributed[row.worker] = AcceptedContribution(row.tokens, row.digest)
    return opening
