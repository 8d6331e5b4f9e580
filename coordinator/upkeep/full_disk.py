"""A full disk: noticed once, told once, and over when there is room.

Nothing has to be undone for it: whatever fails for want of room leaves neither a file nor a row, is answered with
`storage-full`, and is tried again by whoever wanted it.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from coordinator.runs.live_run import LiveRun
from coordinator.store.database import disk_is_full
from coordinator.store.files import DataDirectory

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
QUIET_S = 30.0  # without another failure, before the disk counts as having room: a small file fits long before a delta


class Storage:
    """Whether the disk is full. `note_full` may be called from anywhere, `look` and `tick` now and then."""

    def __init__(self, data: DataDirectory, clock: Callable[[], float]) -> None:
        self._data, self._clock = data, clock
        self._last_failure: float | None = None
        self._notified: set[int] = set()  # runs whose events say that it is full

    def note_full(self) -> None:
        """A write has just failed for want of room."""
        if self._last_failure is None:
            logger.error("the disk of %s is full; going on when there is room", self._data.root)
        self._last_failure = self._clock()

    def check(self) -> None:
        """Find out whether there is room again."""
        if (
            self._last_failure is not None
            and self._clock() - self._last_failure >= QUIET_S
            and has_room(self._data.incoming())
        ):
            logger.info("the disk of %s has room again", self._data.root)
            self._last_failure = None

    def tick(self, run: LiveRun) -> None:
        """Tell the run once that the disk is full, as soon as the database takes it, and once that it is over."""
        with run.lock:  # so that of two ticks at once one tells it
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
    """Whether a file of some size can be written at `probe`."""
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
