"""Faults of the disk, the bucket or the database: full, out of reach, locked, read-only. A fault is shown while it
lasts.

Nothing needs to be undone: a failed write leaves neither a file nor a row. The request gets `storage-full` or
`not-ready`, and its sender retries. Because writes fail many times per second, the log has one line when a fault
begins, one every REMIND_S seconds, and one when it is over.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.run.live_run import LiveRun
from coordinator.store.blobs import Blobs, NotLeading, StoreProbe
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database, Fault, fault_of
from outerstep.common.quantities import duration_text
from protocol.errors import Problem
from protocol.messages import Cause

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
PROBE = "probe"  # a blob
SILENT_S = 15.0  # without an answer of the bucket, before that is a fault: a busy line is slow
QUIET_S = 30.0  # without a failed write, before the disk is probed: the small probe may fit when a delta does not
REMIND_S = 300.0


@dataclass
class _Outage:
    """A fault that lasts. `since`, `last` and `logged`: monotonic times of the first failed write, of the last one, and
    of the last log line."""

    fault: Fault
    since: float
    last: float
    logged: float
    failures: int


class Storage:
    """Records faults of the disk and the database.

    `note` may be called from any thread; `check` and `tick` are called a few times per second.
    """

    def __init__(
        self,
        data: DataDirectory,
        blobs: Blobs,
        database: Database,
        submit: Callable[..., object],
        clock: Callable[[], float],
        probe: StoreProbe | None = None,
    ) -> None:
        """`probe`: of the bucket; None if the blobs are not in one."""
        self.probe = probe
        self._data, self._blobs, self._database, self._submit, self._clock = data, blobs, database, submit, clock
        self._lock = threading.Lock()
        self._outages: dict[Cause, _Outage] = {}
        self._recorded_full: set[int] = set()  # runs whose latest event about the disk reports it as full
        self._probing = False
        self._unrecorded: dict[int, _Outage] = {}  # by run: the database outage to record as an event once it is over

    @property
    def fault(self) -> Fault | None:
        """The current fault; None if there is none. A full disk takes precedence, because it can cause a database
        fault."""
        for cause in (Cause.STORAGE_FULL, Cause.STORAGE_UNAVAILABLE):
            if (outage := self._outages.get(cause)) is not None:
                return outage.fault
        return None

    def note(self, error: BaseException) -> Fault | None:
        """Record the fault reported by `error`, which a write has raised, and return it. Return None if `error` is not
        about the disk or the database."""
        fault, now = fault_of(error), self._clock()
        if fault is None or isinstance(error, Problem | NotLeading):  # a term that is over is no outage
            return fault
        self._note(fault, now, failures=1)
        return fault

    def _note(self, fault: Fault, now: float, *, failures: int, lasts_s: float = 0.0) -> None:
        with self._lock:
            outage = self._outages.get(fault.cause)
            if outage is None:
                self._outages[fault.cause] = _Outage(fault, now - lasts_s, now, now, failures)
                logger.error("%s (data directory %s); writes will be retried", fault.reason, self._data.root)
                return
            outage.last, outage.fault = now, fault
            outage.failures += failures
            if now - outage.logged >= REMIND_S:
                outage.logged = now
                lasted = duration_text(now - outage.since)
                logger.error("%s; this has lasted %s, and %d writes have failed", fault.reason, lasted, outage.failures)

    def check(self) -> None:
        """Begin an outage if the bucket hangs. End one if the disk, the database or the bucket can be written again. A
        bucket is probed on another thread, because it may take a minute to fail."""
        if self.probe is not None and self.probe.silent_s > SILENT_S:  # no write fails while the bucket hangs
            fault = Fault(Cause.STORAGE_UNAVAILABLE, f"the bucket: {self.probe.why}", of_bucket=True)
            self._note(fault, self._clock(), failures=0, lasts_s=self.probe.silent_s)
        for cause, outage in list(self._outages.items()):
            if self._clock() - outage.last < QUIET_S:
                continue
            if not outage.fault.of_bucket:
                if self._can_be_written():
                    self._end(cause, outage)
            elif not self._probing:
                self._probing = True
                self._submit(self._probe_bucket, cause, outage)

    def _end(self, cause: Cause, outage: _Outage) -> None:
        with self._lock:
            if self._outages.get(cause) is not outage:  # another thread has ended it
                return
            del self._outages[cause]
        lasted = duration_text(outage.last - outage.since)
        logger.warning(
            "writing works again after %s (%s; %d writes failed)", lasted, outage.fault.reason, outage.failures
        )

    def _probe_bucket(self, cause: Cause, outage: _Outage) -> None:
        try:
            self._blobs.put(PROBE, b"")
            self._blobs.delete(PROBE)
            self._end(cause, outage)
        except Exception as error:  # nothing awaits the result: the log reports it
            if self.note(error) is None:
                logger.exception("the bucket could not be probed")
        finally:
            self._probing = False

    def _can_be_written(self) -> bool:
        try:
            self._data.check_space(PROBE_BYTES)
            write_probe(self._data.scratch())
            self._database.probe()
        except Exception as error:
            if self.note(error) is None:
                raise
            return False
        return True

    def tick(self, run: LiveRun) -> None:
        """Record the start and the end of a full disk as events of the run, as soon as there is space for them. Record
        an outage of the database once it is over."""
        with run.lock:  # only one of two concurrent ticks may record an event
            full = Cause.STORAGE_FULL in self._outages
            if full and run.id not in self._recorded_full and not run.ended:
                _record(run, "storage-full", "the coordinator's disk is full; the run continues when there is space")
                self._recorded_full.add(run.id)
            elif not full and run.id in self._recorded_full:
                _record(run, "storage-room", "the coordinator's disk has space again")
                self._recorded_full.discard(run.id)
            if (outage := self._outages.get(Cause.STORAGE_UNAVAILABLE)) is not None:
                if not run.ended:
                    self._unrecorded[run.id] = outage
            elif (over := self._unrecorded.get(run.id)) is not None:
                lasted = duration_text(over.last - over.since)
                _record(run, "storage-unavailable", f"for {lasted} nothing could be written: {over.fault.reason}")
                del self._unrecorded[run.id]


def _record(run: LiveRun, kind: str, message: str) -> None:
    with run.change() as change:
        change.record(kind, message)


def write_probe(path: Path) -> None:
    """Write a file of PROBE_BYTES and delete it. Raises OSError."""
    try:
        with path.open("xb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
