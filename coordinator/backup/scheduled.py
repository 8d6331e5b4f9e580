"""Scheduled backups of the running coordinator, on a separate thread that holds no run's lock."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from coordinator.backup.create import BackupSource, create
from coordinator.backup.locations import Location, open_store
from coordinator.backup.store import BackupInterrupted, BackupStore, DamagedBackup
from coordinator.run.live_run import LiveRun
from protocol.errors import OuterstepError

logger = logging.getLogger(__name__)

RETRY_S = 300.0


@dataclass(frozen=True)
class Schedule:
    """Back up to `location` every `every_s` seconds, and keep the newest `keep` backups."""

    location: Location
    every_s: float
    keep: int


class ScheduledBackups:
    """Makes the backups of one schedule. `tick` is called a few times per second, from any thread.

    last_at    when the last good backup was made, by any process, in seconds since 1970; None before the first
    fault      why the last attempt failed; empty if it succeeded
    failed_at  when it failed, in seconds since 1970
    due        when the next attempt starts, by `clock`; infinite while one is running
    """

    def __init__(
        self,
        schedule: Schedule,
        source: BackupSource,
        closing: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.last_at: float | None = None
        self.fault = ""
        self.failed_at: float | None = None
        self.schedule, self.source = schedule, source
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
    def has_made(self) -> bool:
        """True if this process made the last good backup."""
        return self._made is not None

    @property
    def last_age_s(self) -> float | None:
        """Age of the last good backup; None if there is none. If this process made it, changes of the wall clock do not
        affect the age."""
        if self._made is not None:
            return self._clock() - self._made
        return None if self.last_at is None else self.age_s(self.last_at)

    def age_s(self, at: float) -> float:
        """Return the seconds since `at`, which is in seconds since 1970."""
        return max(0.0, self._now() - at)

    def close(self) -> None:
        """Wait for the running backup to end; `closing` interrupts it."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        wait_s = min(RETRY_S, self.schedule.every_s)
        try:
            wait_s, self.fault = self._make_if_due(), ""
        except BackupInterrupted:
            logger.info("the backup was interrupted: the next one continues with what was copied")
        except OuterstepError as error:
            self._note_fault(error)
            logger.error("a backup failed: %s; it will be retried", error)
        except Exception as error:  # nothing awaits the result: the log and the events report it
            self._note_fault(error)
            logger.exception("a backup failed; it will be retried")
        finally:
            with self._lock:
                self.due = self._clock() + wait_s

    def _note_fault(self, error: Exception) -> None:
        self.fault, self.failed_at = str(error) or type(error).__name__, self._now()

    def _make_if_due(self) -> float:
        """Make a backup unless the newest one is recent enough. Return the seconds until the next one is due."""
        backups = open_store(self.schedule.location, self._now)
        if (remaining_s := self._remaining_s(backups)) > 0:
            return remaining_s
        created = create(self.source, backups, self.schedule.keep, self._now, self._interrupt)
        manifest = created.manifest
        counts = (created.copied_blobs, created.copied_bytes)
        logger.info("made backup %d in %s: %d new blobs, %d bytes", manifest.number, backups, *counts)
        if manifest.lost:
            logger.warning("backup %d lacks %d blobs that are lost or damaged", manifest.number, len(manifest.lost))
        self.last_at, self._made = manifest.made_at, self._clock()
        return self.schedule.every_s

    def _remaining_s(self, backups: BackupStore) -> float:
        """Return the seconds until the next backup is due. Return 0 if the newest one is dated more than `every_s` in
        the future, because then the clock was set back."""
        for number in backups.numbers():
            with suppress(DamagedBackup):
                made_at = backups.manifest(number).made_at
                if made_at != self.last_at:
                    self.last_at, self._made = made_at, None
                every_s = self.schedule.every_s
                remaining_s = self.last_at + every_s - self._now()
                return remaining_s if remaining_s <= 2 * every_s else 0.0
        return 0.0

    def _interrupt(self) -> None:
        if self._closing.is_set():
            raise BackupInterrupted
