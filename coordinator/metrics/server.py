"""The metrics of the server: its requests, its connections, its disks. One registry per application, for several
coordinators may live in one process."""

import shutil
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

from coordinator.http.gate import Gate
from coordinator.metrics.families import OF_THE_SERVER, PREFIX, Family
from coordinator.metrics.runs import RunsCollector, metrics
from coordinator.metrics.values import Value
from coordinator.run.live_run import LiveRun
from coordinator.service import Coordinator
from protocol import __version__

# From what memory answers at once to a long poll, and to a payload on a slow line.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
REFUSALS = ("not-ready", "head-too-large", "request-timeout")

# The text format knows no times of creation: they would be twice as many series.
disable_created_metrics()  # type: ignore[no-untyped-call]

_BY_NAME = {family.name: family for family in OF_THE_SERVER}
_COUNTED = ("http_requests_total", "http_requests_refused_total", "http_request_duration_seconds")


class Meter:
    """What is counted of the requests to one application, and all that there is to scrape. `gate`: None where no server
    is around it."""

    def __init__(self, service: Coordinator, gate: Gate | None) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        requests, refused, duration = (_BY_NAME[PREFIX + name] for name in _COUNTED)
        self._requests = Counter(*_declared(requests), registry=self.registry)
        self._refused = Counter(*_declared(refused), registry=self.registry)
        self._duration = Histogram(*_declared(duration), buckets=BUCKETS_S, registry=self.registry)
        self.registry.register(RunsCollector(lambda: service.runs()))
        self.registry.register(_ServerCollector(service, gate))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route`: its template."""
        method = method if method in METHODS else "other"
        self._requests.labels(method, route, f"{status // 100}xx").inc()
        self._duration.labels(method, route).observe(seconds)
        if status >= 400:
            self._refused.labels(str(status)).inc()

    def exposition(self, run: LiveRun | None) -> bytes:
        """Return all that there is, or what there is of `run` alone, in Prometheus' text format."""
        if run is None:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        registry.register(RunsCollector(lambda: [run]))
        return generate_latest(registry)


def _declared(family: Family) -> tuple[str, str, tuple[str, ...]]:
    return family.name, f"{family.meaning} ({family.unit})", family.labels


class _ServerCollector(Collector):
    def __init__(self, service: Coordinator, gate: Gate | None) -> None:
        self._service, self._gate = service, gate

    def collect(self) -> Iterator[Metric]:
        others = [family for family in OF_THE_SERVER if family.name.removeprefix(PREFIX) not in _COUNTED]
        return metrics(others, self._values())

    def _values(self) -> Iterator[Value]:
        yield f"{PREFIX}build_info", (__version__,), 1
        yield f"{PREFIX}event_streams_open", (), self._service.callers.streams
        if self._gate is not None:
            yield f"{PREFIX}connections_open", (), len(self._gate)
            refused = dict(self._gate.refused)
            for problem in REFUSALS:
                yield f"{PREFIX}connections_refused_total", (problem,), refused.get(problem, 0)
        for place, folder in self._service.places().items():
            found = shutil.disk_usage(folder)
            yield f"{PREFIX}disk_free_bytes", (place,), found.free
            yield f"{PREFIX}disk_size_bytes", (place,), found.total
        if (backups := self._service.backups) is not None:
            yield f"{PREFIX}backup_interval_seconds", (), backups.schedule.every_s
            if backups.last_at is not None:
                yield f"{PREFIX}last_backup_timestamp_seconds", (), backups.last_at
        sender = self._service.sender
        yield f"{PREFIX}notifications_pending", (), 0 if sender is None else len(sender.outbox.pending)
        yield f"{PREFIX}notification_attempts_total", ("sent",), 0 if sender is None else sender.sent
        yield f"{PREFIX}notification_attempts_total", ("failed",), 0 if sender is None else sender.failed
