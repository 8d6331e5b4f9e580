"""What rounds cost: bytes and seconds, as the workers tell them with every request for the next round.

A report is kept per round and worker, and added to what its round, its worker and its run have cost so far. So those
three are complete at any time, and the reports can be deleted with the rest of the history (`retention.py`).
"""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.runs.live_run import Change, LiveRun, Told
from coordinator.store.tables import ReportRow, RoundRow, WorkerRow
from protocol.messages import Account, RoundReport

Key = tuple[str, int, int]  # worker, round, epoch


def book_one(run: LiveRun, worker: str, report: RoundReport) -> None:
    """Book the report. One that was booked before changes nothing, and one of a round that the run has not come to is
    dropped: the run went back to a backup since."""
    tell(run, worker, report)
    with run.lock:
        book(run)


def tell(run: LiveRun, worker: str, report: RoundReport) -> Told:
    """Put the report where the next `book` finds it. Takes no lock and does no I/O: all workers report at once, when a
    round is over, and whoever books first books for all of them."""
    told = Told(worker, report)
    run.reports.append(told)
    return told


def book(run: LiveRun) -> None:
    """Book what was told, in one transaction; where that fails, the next one tries it. Under the run's lock."""
    told: list[Told] = []
    while run.reports:
        told.append(run.reports.popleft())
    if not told:
        return
    latest = {(each.worker, each.report.round, each.report.epoch): each for each in told}
    try:
        _book_new(run, {key: each.report for key, each in latest.items()})
    except BaseException:
        run.reports.extend(latest.values())
        raise
    for each in told:
        each.booked = True


def _book_new(run: LiveRun, told: dict[Key, RoundReport]) -> None:
    with run.world.database.read() as session:
        booked = {
            (worker, round_, epoch)
            for worker, round_, epoch in session.execute(
                select(ReportRow.worker, ReportRow.round, ReportRow.epoch).where(
                    ReportRow.run_id == run.id,
                    ReportRow.round.in_({round_ for _, round_, _ in told}),
                    ReportRow.worker.in_({worker for worker, _, _ in told}),
                )
            )
        }
    new = {key: report for key, report in told.items() if report.round <= run.round and key not in booked}
    if new:
        with run.change() as change:
            _book(change, new)


def _book(change: Change, reports: dict[Key, RoundReport]) -> None:
    """As few statements for a thousand reports as for one."""
    run, session = change.run, change.session
    names, rounds = {worker for worker, _, _ in reports}, {round_ for _, round_, _ in reports}
    run_row = change.row
    workers = {
        row.name: row
        for row in session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name.in_(names)))
    }
    # Who leaves after the last round tells of one that is never opened.
    opened = {
        row.round: row
        for row in session.scalars(select(RoundRow).where(RoundRow.run_id == run.id, RoundRow.round.in_(rounds)))
    }
    for (worker, round_, epoch), report in reports.items():
        account = report.model_dump(mode="json", include={"upload_bytes", "download_bytes", "seconds"})
        session.add(ReportRow(run_id=run.id, round=round_, worker=worker, epoch=epoch, account=account))
        for row in (run_row, workers[worker], opened.get(round_)):
            if row is not None:
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
