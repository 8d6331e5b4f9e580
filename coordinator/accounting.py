"""What rounds cost: bytes and seconds, as the workers tell them with every request for the next round.

A report is kept per round and worker, and added to what its round, its worker and its run have cost so far. So those
three are complete at any time, and the reports can be deleted with the rest of the history (`retention.py`).
"""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.live_run import LiveRun, worker_row
from coordinator.tables import ReportRow, RoundRow
from protocol.messages import Account, RoundReport


def keep(run: LiveRun, worker: str, report: RoundReport) -> None:
    """Book the report. One that was booked before changes nothing, and one of a round that the run has not come to is
    dropped: the run went back to a backup since."""
    tell(run, worker, report)
    with run.lock:
        book(run)


def tell(run: LiveRun, worker: str, report: RoundReport) -> None:
    """Put the report where the next `book` finds it. Takes no lock and does no I/O: all workers report at once, when a
    round is over, and whoever books first books for all of them."""
    run.reports.append((worker, report))


def book(run: LiveRun) -> None:
    """Book what was told, in one transaction; where that fails, the next one tries it. Holds the lock."""
    told: dict[tuple[str, int, int], RoundReport] = {}
    while run.reports:
        name, each = run.reports.popleft()
        told[name, each.round, each.epoch] = each
    if not told:
        return
    try:
        _book_new(run, told)
    except BaseException:
        run.reports.extend((name, each) for (name, *_), each in told.items())
        raise


def _book_new(run: LiveRun, told: dict[tuple[str, int, int], RoundReport]) -> None:
    with run.world.database.read() as session:
        new = [
            (worker, report)
            for (worker, *_), report in told.items()
            if report.round <= run.round and not _booked(run, session, worker, report)
        ]
    if new:
        with run.world.database.write() as session:
            for worker, report in new:
                _book(run, session, worker, report)


def _booked(run: LiveRun, session: Session, worker: str, report: RoundReport) -> bool:
    return session.get(ReportRow, (run.id, report.round, worker, report.epoch)) is not None


def _book(run: LiveRun, session: Session, worker: str, report: RoundReport) -> None:
    account = report.model_dump(mode="json", include={"upload_bytes", "download_bytes", "seconds"})
    session.add(ReportRow(run_id=run.id, round=report.round, worker=worker, epoch=report.epoch, account=account))
    round_row = session.get(RoundRow, (run.id, report.round))
    for row in (run.row(session), worker_row(run, session, worker), round_row):
        if row is not None:  # who leaves after the last round tells of one that is never opened
            row.account = added(row.account, account)


def added(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The sum of two accounts, as JSON."""
    seconds = a.get("seconds", {})
    return {
        "upload_bytes": a.get("upload_bytes", 0) + b["upload_bytes"],
        "download_bytes": a.get("download_bytes", 0) + b["download_bytes"],
        "seconds": seconds | {stage: seconds.get(stage, 0.0) + more for stage, more in b["seconds"].items()},
    }


def by_worker(session: Session, run_id: int, round_: int) -> dict[str, Account]:
    """What one round has cost each worker, as far as they have told."""
    rows = session.scalars(
        select(ReportRow).where(ReportRow.run_id == run_id, ReportRow.round == round_).order_by(ReportRow.worker)
    )
    accounts: dict[str, dict[str, Any]] = {}
    for row in rows:
        accounts[row.worker] = added(accounts.get(row.worker, {}), row.account)
    return {worker: Account.model_validate(account) for worker, account in accounts.items()}
