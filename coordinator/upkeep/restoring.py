"""The restoring of a run after a start: it is rebuilt in memory from the database and goes on where it was.

Nothing acknowledged is lost: every contribution and delta has a row, and every row a durable blob. Every live worker
gets a full new lease, because it is not the workers' fault how long the coordinator was away.
"""

from sqlalchemy import select

from coordinator.runs.live_run import AcceptedContribution, LiveRun, OpenFragment, OpenRound
from coordinator.store.tables import AssignmentRow, ContributionRow, FragmentRow, RoundRow, WorkerRow
from coordinator.sync import outer_state
from coordinator.upkeep import setting_aside, sweeping
from protocol.messages import FragmentState, Metrics, WorkerState


def restore(run: LiveRun) -> None:
    """Rebuild the run in memory and let it settle."""
    with run.lock:
        setting_aside.set_aside_newer(run)
        _restore_workers(run)
        _restore_open_round(run)
        sweeping.sweep(run)
        if run.layout is not None:
            outer_state.restore(run)
        run.restored()


def _restore_workers(run: LiveRun) -> None:
    now = run.world.clock()
    with run.world.database.read() as session:
        rows = session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.state == WorkerState.LIVE)
        ).all()
        run.members.previous = set(
            session.scalars(
                select(AssignmentRow.worker).where(AssignmentRow.run_id == run.id, AssignmentRow.round == run.round - 1)
            )
        )
    for row in rows:
        if row.token_hash is not None:
            run.members.tokens[row.token_hash] = row.name
        run.members.leases.renew(row.name, now)
        run.members.metrics[row.name] = Metrics.model_validate(row.metrics)


def _restore_open_round(run: LiveRun) -> None:
    with run.world.database.read() as session:
        if session.get(RoundRow, (run.id, run.round)) is None:
            return
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
    run.open = OpenRound(
        run.round,
        run.world.clock(),
        set(assigned),
        [OpenFragment(state=FragmentState(row.state), reason=row.reason) for row in fragments],
    )
    for row in contributions:
        run.open.fragments[row.fragment].contributed[row.worker] = AcceptedContribution(row.tokens, row.digest)
