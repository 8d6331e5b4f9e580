"""Scheduled backups of the running coordinator, on a separate thread that holds no run's lock."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from coordinator.backup.contents import BackupInterrupted, DamagedBackup, Manifest
from coordinator.backup.restore import Backups
from coordinator.run.live_run import LiveRun
from outerstep.common.quantities import duration_text
from protocol.errors import OuterstepError

logger = logging.getLogger(__name__)

RETRY_S = 300.0
MISSED = 3  # backups are overdue after this many intervals without one


class ScheduledBackups:
    """Makes a backup every `every_s` seconds. `tick` is called a few times per second, from any thread.

    last_at    when the last good backup was made, by any process, in seconds since 1970; None before the first
    fault      why the last attempt failed; empty if it succeeded
    failed_at  when it failed, in seconds since 1970
    due        when the next attempt starts, by `clock`; infinite while one is running
    """

    def __init__(
        self,
        backups: Backups,
        make: Callable[[Callable[[], object]], Manifest],
        every_s: float,
        closing: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`backups`: those that there are. `make` makes one; its argument is called now and then, and may raise."""
        self.last_at: float | None = None
        self.fault = ""
        self.failed_at: float | None = None
        self.backups, self.make, self.every_s = backups, make, every_s
        self._closing, self._clock, self._now = closing, clock, now
        self._lock = threading.Lock()
        self.due = -math.inf  # at once: the first tick finds out when the newest backup was made
        self._made: float | None = None  # when the last one was made, by `clock`; None if another process made it
        self._failure_recorded: set[int] = set()  # runs whose latest event about backups reports a failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backup")

    def tick(self) -> None:
        """Start a backup if one is due."""
        with self._lock:
            if self._clock() < self.due:
                return
            self.due = math.inf
        self._thread.submit(self._work)

    def record(self, run: LiveRun) -> None:
        """Record as events of the run that backups fail, and that they succeed again. Each is recorded once."""
        with run.lock:
            if self.fault and run.id not in self._failure_recorded and not run.ended:
                with run.change() as change:
                    change.record("backup-failed", f"a backup failed: {self.fault}; it will be retried")
                self._failure_recorded.add(run.id)
            elif not self.fault and run.id in self._failure_recorded:
                with run.change() as change:
                    change.record("backup-made", "backups succeed again")
                self._failure_recorded.discard(run.id)

    @property
    def last_age_s(self) -> float | None:
        """Age of the last good backup; None if there is none. If this process made it, changes of the wall clock do not
        affect the age."""
        if self._made is not None:
            return self._clock() - self._made
        return None if self.last_at is None else self._since(self.last_at)

    @property
    def trouble(self) -> str | None:
        """Why an operator should look at the backups; None if there is no reason."""
        age_s = self.last_age_s
        last = "there is no successful backup yet"
        if age_s is not None:
            last = f"the last successful backup is {duration_text(age_s)} old"
        if self.fault:
            ago = "" if self.failed_at is None else f" {duration_text(self._since(self.failed_at))} ago"
            return f"backup failed{ago}: {self.fault}; {last}"
        return (
            f"the scheduled backup is overdue; {last}" if age_s is not None and age_s > MISSED * self.every_s else None
        )

    def _since(self, at: float) -> float:
        """Return the seconds since `at`, which is in seconds since 1970."""
        return max(0.0, self._now() - at)

    def close(self) -> None:
        """Wait for the running backup to end; `closing` interrupts it."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def make_now(self, make: Callable[[], Manifest]) -> None:
        """Call `make`, which makes a backup outside of the schedule. The next one is due `every_s` seconds later.

        Raises what `make` raises.
        """
        wait_s = min(RETRY_S, self.every_s)
        try:
            self._note_made(make())
            self.fault, wait_s = "", self.every_s
        except Exception as error:
            self._note_fault(error)
            raise
        finally:
            with self._lock:
                if self.due < math.inf:
                    self.due = self._clock() + wait_s

    def _work(self) -> None:
        wait_s = min(RETRY_S, self.every_s)
        try:
            wait_s, self.fault = self._make_if_due(), ""
        except BackupInterrupted:
            logger.info("the backup was interrupted: the next one continues with what was copied")
        except (OuterstepError, OSError) as error:
            self._note_fault(error)
            logger.error("a backup failed: %s; it will be retried", self.fault)
        except Exception as error:  # nothing awaits the result: the log and the events report it
            self._note_fault(error)
            logger.exception("a backup failed; it will be retried")
        finally:
            with self._lock:
                self.due = self._clock() + wait_s

    def _note_fault(self, error: Exception) -> None:
        self.fault, self.failed_at = str(error) or type(error).__name__, self._now()

    def _note_made(self, manifest: Manifest) -> None:
        logger.info("made backup %d in %s", manifest.number, self.backups)
        if manifest.lost:
            logger.warning("backup %d lacks %d blobs that are lost or damaged", manifest.number, len(manifest.lost))
        self.last_at, self._made = manifest.made_at, self._clock()

    def _make_if_due(self) -> float:
        """Make a backup unless the newest one is recent enough. Return the seconds until the next one is due."""
        if (remaining_s := self._remaining_s()) > 0:
            return remaining_s
        self._note_made(self.make(self._interrupt))
        return self.every_s

    def _remaining_s(self) -> float:
        """Return the seconds until the next backup is due. Return 0 after a failure, and if the newest one is dated
        more than `every_s` in the future, because then the clock was set back."""
        if (made_at := self._newest_at()) is None:
            return 0.0
        if made_at != self.last_at:
            self.last_at, self._made = made_at, None
        remaining_s = made_at + self.every_s - self._now()
        return remaining_s if remaining_s <= 2 * self.every_s and not self.fault else 0.0

    def _newest_at(self) -> float | None:
        """Return when the newest backup was made, by any process, in seconds since 1970; None if there is none."""
        for number in self.backups.numbers():
            with suppress(DamagedBackup):
                return self.backups.manifest(number).made_at
        return None

    def _interrupt(self) -> None:
        if self._closing.is_set():
            raise BackupInterrupted
