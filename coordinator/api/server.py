"""The coordinator itself, apart from its runs: health, status, metrics, and line checks.

A line check sends random bytes up or down, so that a box can measure its connection before it joins. Nothing is stored.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from coordinator.api.metrics.runs import exported
from coordinator.api.metrics.server import ServerMetrics
from coordinator.http.access import Caller, LineChecker, OperatorOfAll, Service, charge
from coordinator.http.bodies import LimitedRoute, chunks, max_body
from coordinator.http.openapi import Document, Responses, problem_responses
from coordinator.http.response_cache import Caches
from coordinator.http.uploads import CHUNK_BYTES
from coordinator.notifications.sending import Sender
from coordinator.process import scrubbed
from coordinator.quotas import lineage_of
from coordinator.reporting import run_reports
from coordinator.reporting.alerts import Key
from coordinator.service import Coordinator
from coordinator.store.database import Fault
from protocol import PROTOCOL_VERSION, __version__
from protocol.messages import (
    LINE_CHECK_BYTES,
    AggregatorInfo,
    BackupInfo,
    Cause,
    ClientsInfo,
    CoordinatorInfo,
    DatabaseInfo,
    DiskInfo,
    Finding,
    Health,
    LoggedError,
    NotifiedInfo,
    Readiness,
    Scope,
    ServerStatus,
)

router = APIRouter(route_class=LimitedRoute)

METRICS_MAX_AGE_S = 1.0  # for callers that are not admins
_MEDIA_TYPE = "application/octet-stream"
_BYTES: Document = {_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_RANDOM: Responses = {"200": {"description": "As many random bytes as requested.", "content": _BYTES}}
_TEXT: Responses = {"200": {"content": {"text/plain": {"schema": {"type": "string"}}}}}


# --- line checks ------------------------------------------------------------------------------------------------------


@router.get(
    "/v1/line-check",
    tags=["line check"],
    response_class=StreamingResponse,
    responses=_RANDOM | problem_responses("forbidden"),
)
async def line_check_down(
    _: LineChecker, count: Annotated[int, Query(alias="bytes", ge=0, le=LINE_CHECK_BYTES)] = 0
) -> StreamingResponse:
    """Send this many bytes; with 0, only check that the token allows joining. One check at a time per token."""
    headers = {"Content-Length": str(count), "Cache-Control": "private, no-store"}
    return _CountedDownload(iter(()), media_type=_MEDIA_TYPE, headers=headers)


@router.post(
    "/v1/line-check",
    tags=["line check"],
    status_code=204,
    responses=problem_responses("forbidden"),
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
@max_body(LINE_CHECK_BYTES, streamed=True)
async def line_check_up(request: Request, service: Service, caller: LineChecker) -> Response:
    """Receive the body and discard it. One check at a time per token."""
    with service.quotas.line_check(lineage_of(caller)):
        async for _chunk in chunks(request, service.settings):
            pass
    return Response(status_code=204)


class _CountedDownload(StreamingResponse):
    """A line check that counts towards its caller's quota. Raises Problem `too-many-requests` if one is already
    running."""

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        count = int(self.headers["content-length"])
        if not count:
            await super().__call__(scope, receive, send)
            return
        service: Coordinator = scope["app"].state.coordinator
        with ExitStack() as counted:
            counted.enter_context(service.quotas.line_check(lineage_of(scope["state"]["identity"])))
            self.body_iterator = random_bytes(count, counted.close)
            await super().__call__(scope, receive, send)


async def random_bytes(count: int, before_last: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield `count` random bytes. Call `before_last` before the last ones: a client that has them may ask again before
    this coroutine continues."""
    for at in range(0, count, CHUNK_BYTES):
        if at + CHUNK_BYTES >= count:
            before_last()
        yield _random_chunk()[: count - at]


@cache
def _random_chunk() -> bytes:
    """Return random bytes, because no proxy can compress them."""
    return os.urandom(CHUNK_BYTES)


# --- health: for containers and load balancers, without a token -------------------------------------------------------


@router.get("/healthz", tags=["health"], responses=problem_responses(token=False))
async def healthz() -> Health:
    """Check that the process is alive."""
    return Health(status="ok", version=__version__, protocol=PROTOCOL_VERSION)


@router.get("/readyz", tags=["health"], responses=problem_responses("not-ready", token=False))
def readyz(service: Service) -> Readiness:
    """Check that the database answers and the data directory is writable."""
    service.check_ready()
    return Readiness(
        status="ready", version=__version__, protocol=PROTOCOL_VERSION, last_backup_at=service.last_backup_at
    )


# --- status -----------------------------------------------------------------------------------------------------------

REMEDIES = {
    "run-stalled": "`outerstep run show {run}` shows what it waits for. `outerstep run member {run} WORKER evict` lets "
    "the round close without a worker that makes no progress",
    "disk-filling": "Free space, or enlarge the disk: `outerstep run rm RUN` removes a run that has ended, with its "
    "files",
    "backup-failed": "Fix the cause; the coordinator retries within five minutes. `outerstep coordinator backup DIR "
    "--data-dir DIR` makes a backup now",
    "database": "Check the database's disk and file system; the log has details",
    "bucket": "`outerstep doctor --blobs URL` checks it from this machine; runs continue once it can be written again",
    "coordinator": "Start it again, or fix its way to the database and the store: its own log has details. One that "
    "was removed on purpose disappears from the list after ten minutes",
    "aggregator": "Start it again, in the coordinators' version. One that was removed on purpose disappears from the "
    "list after ten minutes; meanwhile the others and the leader do its work",
    "files": "Put the files back, or restore the data directory from a backup (`outerstep coordinator restore`). "
    "`outerstep run rm {run}` removes a run that has ended and that nobody needs",
    "notifications": "Test the receivers with `outerstep coordinator notify-test`; to change them, restart the "
    "coordinator",
}


@router.get("/v1/status", tags=["health"], responses=problem_responses("forbidden"))
def get_status(http: Request, service: Service, _: OperatorOfAll) -> ServerStatus:
    """Disks, backups, version, database, clients, notifications, recent errors; and findings with their remedies."""
    connections = http.app.state.connections
    return _status(service, 0 if connections is None else len(connections))


def _status(service: Coordinator, connections: int) -> ServerStatus:
    database = _database(service)
    return ServerStatus(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        started_at=service.started_at,
        now=service.now(),
        findings=[
            *_findings(service.alerts.conditions, service.storage.fault, database, service.notifier.senders),
            *(
                _finding("files", run.name, lost)
                for run in service.runs()
                if (lost := run_reports.lost_files(run)) is not None
            ),
            *(
                _finding("coordinator", None, scrubbed(each))
                for each in (service.peers.troubles() if service.peers else ())
            ),
            *(
                _finding("aggregator", None, scrubbed(each))
                for each in (service.delegation.troubles() if service.delegation else ())
            ),
        ],
        disks=[
            DiskInfo(places=list(each.places), free_bytes=each.free_bytes, size_bytes=each.size_bytes)
            for each in service.alerts.disks(service.places())
        ],
        database=database,
        backup=_backup(service),
        notifications=[_notified(each) for each in service.notifier.senders],
        clients=ClientsInfo(
            workers=sum(len(run.members) for run in service.runs()),
            streams=service.quotas.streams,
            connections=connections,
        ),
        coordinators=_coordinators(service),
        aggregators=[
            AggregatorInfo(**{**vars(each), "silent_s": max(0.0, each.silent_s)})
            for each in (service.delegation.aggregators if service.delegation else ())
        ],
        tasks_waiting=service.delegation.waiting if service.delegation else 0,
        errors=[LoggedError(**vars(each)) for each in service.errors.newest_first],
    )


def _findings(
    conditions: Mapping[Key, str],
    storage: Fault | None,
    database: DatabaseInfo,
    senders: Sequence[Sender],
) -> Iterator[Finding]:
    """Yield each problem with its remedy: first those of the server, then those of runs."""
    if database.fault:
        yield _finding("database", None, database.fault)
    if storage is not None and storage.of_bucket:
        yield _finding("bucket", None, scrubbed(storage.reason))
    for (about, run), message in conditions.items():
        if run is None:
            yield _finding(about, None, message)
    for sender in senders:
        if sender.fault:
            yield _finding("notifications", None, f"the last notification was not sent: {sender.fault}")
    for (about, run), message in conditions.items():
        if run is not None:
            yield _finding(about, run, message)


def _finding(about: str, run: str | None, message: str) -> Finding:
    return Finding(about=about, run=run, message=message, remedy=REMEDIES[about].format(run=run))


def _database(service: Coordinator) -> DatabaseInfo:
    database, began = service.database, service.clock()
    failing = service.storage.fault
    is_ours = failing is not None and failing.cause is Cause.STORAGE_UNAVAILABLE and not failing.of_bucket
    fault = failing.reason if failing is not None and is_ours else ""
    found = DatabaseInfo(backend=database.name, schema_revision=None, size_bytes=None, answer_s=None, fault=fault)
    try:
        revision = database.revision()
        answers = {"schema_revision": revision, "answer_s": service.clock() - began}
        return found.model_copy(update={**answers, "size_bytes": database.size_bytes()})
    except (OSError, SQLAlchemyError) as error:
        fault = f"the database does not answer: {getattr(error, 'orig', error)}"
        return found.model_copy(update={"fault": fault})


def _coordinators(service: Coordinator) -> list[CoordinatorInfo]:
    if (peers := service.peers) is None:
        return []
    return [
        CoordinatorInfo(
            id=each.id,
            address=each.address,
            version=each.version,
            leads=each.id == peers.leader,
            silent_s=max(0.0, each.silent_s),
            store_fault=scrubbed(each.store_fault),
        )
        for each in peers.all
    ]


def _backup(service: Coordinator) -> BackupInfo | None:
    if (backups := service.backups) is None:
        return None
    return BackupInfo(
        every_s=backups.every_s,
        last_at=backups.last_at,
        failed_at=backups.failed_at,
        fault=scrubbed(backups.fault),
    )


def _notified(sender: Sender) -> NotifiedInfo:
    return NotifiedInfo(
        name=sender.receiver.name,
        signed=sender.receiver.secret is not None,
        sent=sender.sent,
        failed=sender.failed,
        sent_at=sender.sent_at,
        failed_at=sender.failed_at,
        fault=sender.fault,
    )


# --- metrics ----------------------------------------------------------------------------------------------------------


@router.get(
    "/metrics", tags=["metrics"], response_class=PlainTextResponse, responses=_TEXT | problem_responses("not-found")
)
async def get_metrics(http: Request, service: Service, caller: Caller) -> Response:
    """Metrics in Prometheus' text format: of the server and all runs; only of its run, if the token is for one."""
    run = None if caller.run is None else service.run(caller.run)
    charge(http, len(exported(service.runs())) if run is None else 1)
    metrics: ServerMetrics = http.app.state.metrics
    caches: Caches = http.app.state.caches
    make = partial(anyio.to_thread.run_sync, metrics.exposition, run, limiter=service.read_threads)
    if caller.allows(Scope.ADMIN):
        text = await make()
    else:
        text, _ = await caches.metrics.read(run, METRICS_MAX_AGE_S, make)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)
