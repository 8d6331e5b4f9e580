"""Metrics of the server: requests, connections, disks, backups, notifications. Each application has its own registry,
because tests run several coordinators in one process."""

import logging
import shutil
import time
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.metrics.families import OF_THE_SERVER, PREFIX, Family
from coordinator.api.metrics.runs import RunsCollector, Value, metrics
from coordinator.http.connection_limit import ConnectionLimit
from coordinator.http.middleware import is_head
from coordinator.run.live_run import LiveRun
from coordinator.service import Coordinator
from coordinator.store.lease import SILENT_S, Peers
from protocol import __version__
from protocol.text import printable

logger = logging.getLogger(__name__)

# The range covers responses from memory, long polls, and payloads over a slow network.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
REFUSALS = ("not-ready", "head-too-large", "invalid-request", "request-timeout")
NO_ROUTE = "none"  # clients could otherwise create any number of labels with paths that do not exist
CLIENT_GONE = 499  # the client disconnected before the response

# Creation times are not part of the text format; they would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

_BY_NAME = {family.name: family for family in OF_THE_SERVER}
_COUNTED = ("http_requests_total", "http_requests_refused_total", "http_request_duration_seconds")


class ServerMetrics:
    """The counters of an application's requests, and all metrics that are scraped from it. `connections`: None if the
    application runs without a server."""

    def __init__(self, service: Coordinator, connections: ConnectionLimit | None) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        requests, refused, duration = (_BY_NAME[PREFIX + name] for name in _COUNTED)
        self._requests = Counter(*_declared(requests), registry=self.registry)
        self._refused = Counter(*_declared(refused), registry=self.registry)
        self._duration = Histogram(*_declared(duration), buckets=BUCKETS_S, registry=self.registry)
        self.registry.register(RunsCollector(lambda: service.runs()))
        self.registry.register(_ServerCollector(service, connections))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route`: its path template."""
        method = method if method in METHODS else "other"
        self._requests.labels(method, route, f"{status // 100}xx").inc()
        self._duration.labels(method, route).observe(seconds)
        if status >= 400:
            self._refused.labels(str(status)).inc()

    def exposition(self, run: LiveRun | None) -> bytes:
        """Return all metrics, or only those of `run`, in Prometheus' text format."""
        if run is None:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        registry.register(RunsCollector(lambda: [run]))
        return generate_latest(registry)


def _declared(family: Family) -> tuple[str, str, tuple[str, ...]]:
    return family.name, f"{family.meaning} ({family.unit})", family.labels


class _ServerCollector(Collector):
    def __init__(self, service: Coordinator, connections: ConnectionLimit | None) -> None:
        self._service, self._connections = service, connections

    def collect(self) -> Iterator[Metric]:
        others = [family for family in OF_THE_SERVER if family.name.removeprefix(PREFIX) not in _COUNTED]
        return metrics(others, self._values())

    def _values(self) -> Iterator[Value]:
        yield f"{PREFIX}build_info", (__version__,), 1
        yield f"{PREFIX}event_streams_open", (), self._service.quotas.streams
        if self._connections is not None:
            yield f"{PREFIX}connections_open", (), len(self._connections)
            refused = dict(self._connections.refused)
            for problem in REFUSALS:
                yield f"{PREFIX}connections_refused_total", (problem,), refused.get(problem, 0)
        for place, folder in self._service.places().items():
            found = shutil.disk_usage(folder)
            yield f"{PREFIX}disk_free_bytes", (place,), found.free
            yield f"{PREFIX}disk_size_bytes", (place,), found.total
        if (backups := self._service.backups) is not None:
            yield f"{PREFIX}backup_interval_seconds", (), backups.every_s
            if backups.last_at is not None:
                yield f"{PREFIX}last_backup_timestamp_seconds", (), backups.last_at
        if self._service.peers is not None:
            yield from of_peers(self._service.peers)
        if (delegation := self._service.delegation) is not None:
            yield f"{PREFIX}aggregators", (), len(delegation.available)
            yield f"{PREFIX}aggregation_tasks_waiting", (), delegation.waiting
            for outcome in ("done", "failed", "withdrawn", "refused"):
                yield f"{PREFIX}aggregation_tasks_total", (outcome,), delegation.outcomes[outcome]
        senders = self._service.notifier.senders
        yield f"{PREFIX}notifications_total", ("sent",), sum(each.sent for each in senders)
        yield f"{PREFIX}notifications_total", ("failed",), sum(each.failed for each in senders)


def of_peers(peers: Peers) -> Iterator[Value]:
    """Yield the metrics of a coordinator that shares its database."""
    yield f"{PREFIX}leads", (), int(peers.leads)
    yield f"{PREFIX}leader_term", (), peers.term
    yield f"{PREFIX}coordinators", (), sum(each.silent_s <= SILENT_S for each in peers.all)
    yield f"{PREFIX}superseded_writes_total", (), peers.superseded
    if peers.store_answer_s is not None:
        yield f"{PREFIX}store_answer_seconds", (), peers.store_answer_s


class PeersCollector(Collector):
    """What a standby exports."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        values = [(f"{PREFIX}build_info", (__version__,), 1), *of_peers(self._peers)]
        names = {name for name, _, _ in values}
        return metrics([family for family in OF_THE_SERVER if family.name in names], iter(values))


class RequestMetrics:
    """Middleware that counts and times every request, and logs it at level debug.

    It wraps all middleware that can answer a request, exception handlers included, except `PrepareRequest`.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), CLIENT_GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            method = "HEAD" if is_head(scope) else scope["method"]
            seconds = time.perf_counter() - began
            self._metrics.note(method, route, status, seconds)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s %s answered %d in %.3f s", method, printable(scope["path"]), status, seconds)
