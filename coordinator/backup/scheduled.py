"""Backups that the running coordinator makes by itself, on a thread of its own: it holds no lock of a run."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from coordinator.backup.copying import Interrupted
from coordinator.backup.making import Source, make
from coordinator.backup.place import Damaged, Place
from coordinator.backup.places import Address, place_of
from coordinator.run.live_run import LiveRun
from protocol.errors import OuterstepError

logger = logging.getLogger(__name__)

RETRY_S = 300.0


@dataclass(frozen=True)
class Schedule:
    """Every so many seconds a backup at this place, of which the newest `keep` stay."""

    address: Address
    every_s: float
    keep: int


class Scheduled:
    """The backups of one schedule. `last_at` is when the last good one was made, also by an earlier process or by a
    command, in seconds since 1970; None before the first. `tick` is called a few times a second, from any thread."""

    def __init__(
        self,
        schedule: Schedule,
        source: Source,
        closing: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.last_at: float | None = None
        self.fault = ""  # why the last one failed
        self.failed_at: float | None = None  # when that was, in seconds since 1970
        self.schedule, self.source = schedule, source
        self._closing, self._clock, self._now = closing, clock, now
        self._lock = threading.Lock()
        self.due = -math.inf  # by the clock: at once, to see what is there; infinite while one is being made
        self._made: float | None = None  # when, by the clock, the last one was; None if another process made it
        self._told: set[int] = set()  # runs whose latest event about it says that one failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backup")

    def tick(self) -> None:
        """Begin a backup if it is time."""
        with self._lock:
            if self._clock() < self.due:
                return
            self.due = math.inf
        self._thread.submit(self._work)

    def tell(self, run: LiveRun) -> None:
        """Record the event that a backup failed, once per run, and once the other."""
        with run.lock:
            if self.fault and run.id not in self._told and not run.ended:
                with run.change() as change:
                    change.record("backup-failed", f"a backup failed: {self.fault}; it is tried again")
                self._told.add(run.id)
            elif not self.fault and run.id in self._told:
                with run.change() as change:
                    change.record("backup-made", "backups are made again")
                self._told.discard(run.id)

    @property
    def has_made(self) -> bool:
        """Whether this process made the last good one."""
        return self._made is not None

    @property
    def last_age_s(self) -> float | None:
        """How long ago the last good one was made, whatever was done to the wall clock since if this process made it;
        None if there is none."""
        if self._made is not None:
            return self._clock() - self._made
        return None if self.last_at is None else self.age_s(self.last_at)

    def age_s(self, at: float) -> float:
        """Return how long ago a backup was made, or failed, at `at`."""
        return max(0.0, self._now() - at)

    def close(self) -> None:
        """End the work, which `closing` interrupts."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        wait_s = min(RETRY_S, self.schedule.every_s)
        try:
            wait_s, self.fault = self._make_if_due(), ""
        except Interrupted:
            logger.info("the backup is interrupted: the next one goes on with what was copied")
        except OuterstepError as error:
            self._note_fault(error)
            logger.error("a backup failed: %s; it is tried again", error)
        except Exception as error:  # nobody awaits it: the log and the events say it
            self._note_fault(error)
            logger.exception("a backup failed; it is tried again")
        finally:
            with self._lock:
                self.due = self._clock() + wait_s

    def _note_fault(self, error: Exception) -> None:
        self.fault, self.failed_at = str(error) or type(error).__name__, self._now()

    def _make_if_due(self) -> float:
        """Make a backup unless the newest one is new enough; return in how many seconds the next one is due."""
        backups = place_of(self.schedule.address, self._now)
        if (remaining_s := self._remaining_s(backups)) > 0:
            return remaining_s
        made = make(self.source, backups, self.schedule.keep, self._now, self._interrupt)
        told = (made.manifest.number, backups, made.copied_blobs, made.copied_bytes)
        logger.info("made backup %d in %s: %d new blobs, %d bytes", *told)
        if made.manifest.lost:
            logger.warning("it is without %d blobs that are lost or spoilt", len(made.manifest.lost))
        self.last_at, self._made = made.manifest.made_at, self._clock()
        return self.schedule.every_s

    def _remaining_s(self, backups: Place) -> float:
        """Return for how long the newest backup is new enough: not at all if it was made later than now by more than
        `every_s`, for then the clock was set back."""
        for number in backups.numbers():
            with suppress(Damaged):
                made_at = backups.manifest(number).made_at
                if made_at != self.last_at:
                    self.last_at, self._made = made_at, None
                every_s = self.schedule.every_s
                remaining_s = self.last_at + every_s - self._now()
                return remaining_s if remaining_s <= 2 * every_s else 0.0
        return 0.0

    def _interrupt(self) -> None:
        if self._closing.is_set():
            raise Interrupted
