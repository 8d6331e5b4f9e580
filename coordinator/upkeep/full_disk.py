"""A full disk: an event says that it is full, and another that it has room again.

Nothing has to be undone: a write that finds the disk full leaves neither a file nor a row, the request is answered with
`storage-full`, and whoever sent it tries again.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from coordinator.runs.live_run import LiveRun
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import disk_is_full

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
QUIET_S = 30.0  # without a failed write, before the disk is probed: the small probe fits long before a delta does


class Storage:
    """The record of whether the disk is full.

    `note_full` may be called from any thread; `check` and `tick` are called a few times a second.
    """

    def __init__(self, data: DataDirectory, clock: Callable[[], float]) -> None:
        self._data, self._clock = data, clock
        self._last_failure: float | None = None
        self._notified: set[int] = set()  # runs whose latest event about it says that it is full

    @property
    def is_full(self) -> bool:
        """True from a write that found the disk full until there is room again."""
        return self._last_failure is not None

    def note_full(self) -> None:
        """Note that a write has just found the disk full."""
        if self._last_failure is None:
            logger.error("the disk of %s is full; going on when there is room", self._data.root)
        self._last_failure = self._clock()

    def check(self) -> None:
        """Find out whether there is room again."""
        if (
            self._last_failure is not None
            and self._clock() - self._last_failure >= QUIET_S
            and has_room(self._data.scratch())
        ):
            logger.info("the disk of %s has room again", self._data.root)
            self._last_failure = None

    def tick(self, run: LiveRun) -> None:
        """Record the event that the disk is full, once per run, as soon as there is room for it; and once the other."""
        with run.lock:  # so that of two ticks at once only one records it
            if self._last_failure is not None and run.id not in self._notified and not run.ended:
                _record(run, "storage-full", "the coordinator's disk is full; the run goes on when there is room")
                self._notified.add(run.id)
            elif self._last_failure is None and run.id in self._notified:
                _record(run, "storage-room", "the coordinator's disk has room again")
                self._notified.discard(run.id)


def _record(run: LiveRun, kind: str, message: str) -> None:
    with run.change() as change:
        change.record(kind, message)


def has_room(probe: Path) -> bool:
    """Return True if a file of PROBE_BYTES can be written at `probe`; it is deleted again."""
    try:
        with probe.open("xb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return True
    except OSError as error:
        if not disk_is_full(error):
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
