"""How the coordinator is, and what to do about what is wrong: the answer of `GET /v1/status`."""

from collections.abc import Iterator, Mapping

from sqlalchemy.exc import SQLAlchemyError

from coordinator.logs import scrubbed
from coordinator.notifications.outbox import Key
from coordinator.service import Coordinator
from protocol import PROTOCOL_VERSION, __version__
from protocol.messages import (
    BackupInfo,
    Cause,
    ClientsInfo,
    DatabaseInfo,
    DiskInfo,
    Finding,
    LoggedError,
    NotificationsInfo,
    ServerStatus,
)

REMEDIES = {
    "run-stalled": "`outerstep run show {run}` says what it waits for. `outerstep run evict {run} WORKER` lets the "
    "round close without a worker that does not get on",
    "disk-filling": "Make room, or the disk larger: `outerstep run rm RUN` removes a run that has ended, with its "
    "files",
    "backup-failed": "Fix that; the coordinator tries again within five minutes. `outerstep coordinator backup PLACE "
    "--data DIR` makes one now",
    "database": "Look at the disk and the file system of the database; the log has more",
    "notifications": "`outerstep coordinator notify-test` tries the webhook; restart the coordinator to give it "
    "another one",
}


def status_of(service: Coordinator, connections: int) -> ServerStatus:
    """Return how the coordinator is now."""
    database, notifications = _database(service), _notifications(service)
    findings = findings_of(service.watch.conditions, database, notifications)
    return ServerStatus(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        started_at=service.started_at,
        now=service.now(),
        findings=list(findings),
        disks=[
            DiskInfo(places=list(each.places), free_bytes=each.free_bytes, size_bytes=each.size_bytes)
            for each in service.watch.disks(service.places())
        ],
        database=database,
        backup=_backup(service),
        notifications=notifications,
        clients=ClientsInfo(
            workers=sum(len(run.members) for run in service.runs()),
            streams=service.callers.streams,
            connections=connections,
        ),
        errors=[LoggedError(**vars(each)) for each in service.errors.newest_first],
    )


def findings_of(
    conditions: Mapping[Key, str], database: DatabaseInfo, notifications: NotificationsInfo | None
) -> Iterator[Finding]:
    """Yield what is wrong, the server's own first, with what to do."""
    if database.fault:
        yield _finding("database", None, database.fault)
    for (about, run), message in conditions.items():
        if run is None:
            yield _finding(about, None, message)
    if notifications is not None and notifications.fault:
        yield _finding("notifications", None, f"the webhook did not take a notification: {notifications.fault}")
    for (about, run), message in conditions.items():
        if run is not None:
            yield _finding(about, run, message)


def _finding(about: str, run: str | None, message: str) -> Finding:
    return Finding(about=about, run=run, message=message, remedy=REMEDIES[about].format(run=run))


def _database(service: Coordinator) -> DatabaseInfo:
    database, began = service.database, service.clock()
    failing = service.storage.fault
    fault = failing.reason if failing is not None and failing.cause is Cause.STORAGE_UNAVAILABLE else ""
    found = DatabaseInfo(backend=database.name, schema_revision=None, size_bytes=None, answer_s=None, fault=fault)
    try:
        revision = database.revision()
        answers = {"schema_revision": revision, "answer_s": service.clock() - began}
        return found.model_copy(update={**answers, "size_bytes": database.size_bytes()})
    except (OSError, SQLAlchemyError) as error:
        fault = f"the database does not answer: {getattr(error, 'orig', error)}"
        return found.model_copy(update={"fault": fault})


def _backup(service: Coordinator) -> BackupInfo | None:
    if (backups := service.backups) is None:
        return None
    return BackupInfo(
        every_s=backups.schedule.every_s,
        last_at=backups.last_at,
        failed_at=backups.failed_at,
        fault=scrubbed(backups.fault),
    )


def _notifications(service: Coordinator) -> NotificationsInfo | None:
    if (sender := service.sender) is None:
        return None
    return NotificationsInfo(
        host=sender.receiver.host,
        format=sender.receiver.format,
        signed=sender.receiver.secret is not None,
        pending=len(sender.outbox.pending),
        dropped=sender.outbox.dropped,
        sent_at=sender.sent_at,
        failed_at=sender.failed_at,
        fault=sender.fault,
    )
