"""What rounds cost, in bytes and seconds. Workers report it with every request for the next assignment.

A report is stored per round, worker and epoch, and added to the accounts of its round, its worker and its run. These
three sums are therefore always complete, and the reports can be deleted with the rest of the history
(`sync/retention.py`).
"""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import Change, LiveRun, QueuedReport
from coordinator.store.tables import ReportRow, RoundRow, WorkerRow
from protocol.messages import Account, RoundReport, added

Key = tuple[str, int, int]  # worker, round, epoch


def book_report(run: LiveRun, worker: str, report: RoundReport) -> None:
    """Add the report to the accounts. Adding it again changes nothing. A report of a round that the run has not reached
    is dropped: it belongs to a history that was lost when the database was restored from a backup."""
    queue_report(run, worker, report)
    book_queued(run)


def queue_report(run: LiveRun, worker: str, report: RoundReport) -> QueuedReport:
    """Queue the report for the next `book_queued`. Takes no lock and does no I/O: all workers report at the same time
    after a round, and the first thread that gets the lock adds all their reports."""
    queued = QueuedReport(worker, report)
    run.reports.append(queued)
    return queued


def book_queued(run: LiveRun) -> None:
    """Add all queued reports to the accounts in one transaction. If it fails, they are queued again."""
    with run.lock:
        queued: list[QueuedReport] = []
        while run.reports:
            queued.append(run.reports.popleft())
        if not queued:
            return
        latest = {(each.worker, each.report.round, each.report.epoch): each for each in queued}
        try:
            new = _not_booked(run, {key: each.report for key, each in latest.items()})
            if new:
                with run.change() as change:
                    _book(change, new)
        except BaseException:
            run.reports.extend(latest.values())
            raise
        for each in queued:
            each.booked = True


def _not_booked(run: LiveRun, reports: dict[Key, RoundReport]) -> dict[Key, RoundReport]:
    """Return those of `reports` that are not in the database yet. Reports of unknown rounds are left out."""
    with run.context.database.read() as session:
        booked = {
            (worker, round_, epoch)
            for worker, round_, epoch in session.execute(
                select(ReportRow.worker, ReportRow.round, ReportRow.epoch).where(
                    ReportRow.run_id == run.id,
                    ReportRow.round.in_({round_ for _, round_, _ in reports}),
                    ReportRow.worker.in_({worker for worker, _, _ in reports}),
                )
            )
        }
    return {key: report for key, report in reports.items() if report.round <= run.round and key not in booked}


def _book(change: Change, reports: dict[Key, RoundReport]) -> None:
    """Add the reports to the database. The number of statements does not grow with the number of reports."""
    run, session = change.run, change.session
    names, rounds = {worker for worker, _, _ in reports}, {round_ for _, round_, _ in reports}
    run_row = change.row
    workers = {
        row.name: row
        for row in session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name.in_(names)))
    }
    # A worker that leaves after the last round reports a round that is never opened.
    opened = {
        row.round: row
        for row in session.scalars(select(RoundRow).where(RoundRow.run_id == run.id, RoundRow.round.in_(rounds)))
    }
    for (worker, round_, epoch), report in reports.items():
        account = report.model_dump(mode="json", exclude={"round", "epoch"})
        session.add(ReportRow(run_id=run.id, round=round_, worker=worker, epoch=epoch, account=account))
        for row in (run_row, workers[worker], opened.get(round_)):
            if row is not None:
                row.account = added(row.account, account)


def by_worker(session: Session, run_id: int, round_: int) -> dict[str, Account]:
    """Return each worker's reported account of one round."""
    rows = session.scalars(
        select(ReportRow).where(ReportRow.run_id == run_id, ReportRow.round == round_).order_by(ReportRow.worker)
    )
    accounts: dict[str, dict[str, Any]] = {}
    for row in rows:
        accounts[row.worker] = added(accounts.get(row.worker, {}), row.account)
    return {worker: Account.model_validate(account) for worker, account in accounts.items()}
