"""A disk or a database that fails: full, locked, read-only. What is wrong is shown until it is over.

Nothing has to be undone: a write that fails leaves neither a file nor a row, the request is answered with
`storage-full` or `not-ready`, and its sender tries again. Writes fail many times a second, so the log has one line when
it begins, one every REMIND_S, and one when it is over.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.run.live_run import LiveRun
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database, Fault, fault_of
from outerstep.common.quantities import duration_text
from protocol.messages import Cause

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
QUIET_S = 30.0  # without a failed write, before the disk is probed: the small probe fits long before a delta does
REMIND_S = 300.0


@dataclass
class _Outage:
    """A fault that lasts. Times are of the monotonic clock: when a write failed first and last, and the last line."""

    fault: Fault
    since: float
    last: float
    logged: float
    failures: int = 1


class Storage:
    """The record of what is wrong with disk and database.

    `note` may be called from any thread; `check` and `tick` are called a few times a second.
    """

    def __init__(self, data: DataDirectory, database: Database, clock: Callable[[], float]) -> None:
        self._data, self._database, self._clock = data, database, clock
        self._lock = threading.Lock()
        self._outages: dict[Cause, _Outage] = {}
        self._told_full: set[int] = set()  # runs whose latest event about it says that the disk is full
        self._met: dict[int, _Outage] = {}  # by run: an outage of the database, to be recorded once it is over

    @property
    def fault(self) -> Fault | None:
        """What is wrong now; None if nothing is. A full disk comes first, as it can be the cause of the other."""
        for cause in (Cause.STORAGE_FULL, Cause.STORAGE_UNAVAILABLE):
            if (outage := self._outages.get(cause)) is not None:
                return outage.fault
        return None

    def note(self, error: BaseException) -> Fault | None:
        """Return what `error`, raised by a write, says of disk or database, and remember it; None if it says nothing
        of them."""
        fault, now = fault_of(error), self._clock()
        if fault is None:
            return None
        with self._lock:
            outage = self._outages.get(fault.cause)
            if outage is None:
                self._outages[fault.cause] = _Outage(fault, now, now, now)
                logger.error("%s (data directory %s); writes are tried again", fault.reason, self._data.root)
                return fault
            outage.last, outage.fault = now, fault
            outage.failures += 1
            if now - outage.logged >= REMIND_S:
                outage.logged = now
                lasted = duration_text(now - outage.since)
                logger.error("%s, for %s now; %d writes have failed", fault.reason, lasted, outage.failures)
        return fault

    def check(self) -> None:
        """Find out whether disk and database can be written again."""
        for cause, outage in list(self._outages.items()):
            if self._clock() - outage.last >= QUIET_S and self._can_be_written():
                lasted = duration_text(outage.last - outage.since)
                logger.warning("over after %s: %s; %d writes had failed", lasted, outage.fault.reason, outage.failures)
                with self._lock:
                    del self._outages[cause]

    def _can_be_written(self) -> bool:
        try:
            self._data.check_room(PROBE_BYTES)
            write_probe(self._data.scratch())
            self._database.probe()
        except Exception as error:
            if self.note(error) is None:
                raise
            return False
        return True

    def tick(self, run: LiveRun) -> None:
        """Record as events of the run that the disk is full, as soon as there is room for that, and that it has room
        again; and an outage of the database, which can be recorded only once it is over."""
        with run.lock:  # so that of two ticks at once only one records it
            full = Cause.STORAGE_FULL in self._outages
            if full and run.id not in self._told_full and not run.ended:
                _record(run, "storage-full", "the coordinator's disk is full; the run goes on when there is room")
                self._told_full.add(run.id)
            elif not full and run.id in self._told_full:
                _record(run, "storage-room", "the coordinator's disk has room again")
                self._told_full.discard(run.id)
            if (outage := self._outages.get(Cause.STORAGE_UNAVAILABLE)) is not None:
                if not run.ended:
                    self._met[run.id] = outage
            elif (over := self._met.get(run.id)) is not None:
                lasted = duration_text(over.last - over.since)
                _record(run, "storage-unavailable", f"for {lasted} nothing could be written: {over.fault.reason}")
                del self._met[run.id]


def _record(run: LiveRun, kind: str, message: str) -> None:
    with run.change() as change:
        change.record(kind, message)


def write_probe(path: Path) -> None:
    """Write a file of PROBE_BYTES and delete it again. Raises OSError."""
    try:
        with path.open("xb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
