"""The loss of an acknowledged contribution by the disk: its fragment collects again, and its worker sends it again.

A coordinator without redundancy cannot recover it by itself. But the worker holds what was acknowledged in memory until
the round is over, so it is asked for it (`contribution-lost`).
"""

from sqlalchemy import select

from coordinator.run.decide import advance
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.open_round import OpenRound
from coordinator.store.tables import ContributionRow, FragmentRow
from coordinator.units.ledger import unconsume_units


def lose_contributions(run: LiveRun, opening: OpenRound, index: int, workers: list[str]) -> None:
    """Remove the contributions of `workers` to fragment `index`, and let it collect again."""
    fragment, round_ = opening.fragments[index], opening.number
    with run.change() as change:
        session, collecting = change.session, advance(fragment.state, "contribution lost")
        row = session.get_one(FragmentRow, (run.id, round_, index))
        row.state, row.reason, row.contributors, row.quorum_at, row.closed_at = collecting, "", None, None, None
        for worker in workers:
            _forget(change, session.get_one(ContributionRow, (run.id, round_, index, worker)))
        message = f"round {round_}, fragment {index}: the disk has lost the contribution of {', '.join(workers)}"
        change.record("contribution-lost", message, round=round_, fragment=index, workers=workers)

        def apply() -> None:
            for worker in workers:
                lost = fragment.contributed.pop(worker)
                run.blobs.delete(run.names.contribution(round_, index, worker, lost.digest))
            fragment.state, fragment.quorum_at, fragment.weights = collecting, None, {}
            opening.without_earlier_units.clear()
            opening.consumed.clear()

        change.after_commit(apply)
        change.wake()


def _forget(change: Change, row: ContributionRow) -> None:
    """Delete the row and subtract it from the counts. With the worker's last row of the round, its units are no longer
    consumed."""
    run, session, run_row = change.run, change.session, change.row
    worker = change.worker_row(row.worker)
    worker.upload_bytes -= row.size
    run_row.upload_bytes -= row.size
    session.delete(row)
    session.flush()
    others = session.scalars(
        select(ContributionRow.fragment)
        .where(
            ContributionRow.run_id == run.id,
            ContributionRow.round == row.round,
            ContributionRow.worker == row.worker,
        )
        .limit(1)
    ).first()
    if others is None:
        units = unconsume_units(session, run.id, row.worker, row.round, live=row.worker in run.members)
        run_row.tokens -= units * run.spec.unit_tokens
        worker.contributions -= 1
        worker.tokens -= units * run.spec.unit_tokens
