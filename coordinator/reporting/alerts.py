"""Alerts that begin and end, checked every few seconds: a stalled run, a disk that fills up, failing backups.

The thresholds are the same as in `deploy/prometheus/alerts.yml`.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from coordinator.process import scrubbed
from coordinator.reporting.round_reports import reason_of
from coordinator.run.live_run import LiveRun
from coordinator.store.tables import RoundRow
from outerstep.common.quantities import duration_text
from protocol.messages import RunState

CHECK_S = 5.0
ROUND_S = 3600.0  # a run is stalled if its round is open for longer than this and than three times the last one
NO_ROUND_S = 1800.0  # a run is also stalled if no round opens for this long
FILLING, ROOM = 0.10, 0.12  # free share of a disk: the alert begins below 10 % and ends at 12 %

ENDED = {
    "disk-filling": f"each disk has more than {ROOM:.0%} free space",
    "backup-failed": "the last backup was successful",
}

Key = tuple[str, str | None]  # the kind of alert, and its run; None: the server


@dataclass(frozen=True)
class Disk:
    """A file system that the coordinator uses. `places`: the names of its folders there ("data", "database")."""

    places: tuple[str, ...]
    free_bytes: int
    size_bytes: int

    @property
    def free(self) -> float:
        """Free space as a share of the whole disk, 0 to 1."""
        return self.free_bytes / self.size_bytes if self.size_bytes else 0.0


def disks(places: Mapping[str, Path]) -> list[Disk]:
    """Return the file systems of these folders. `places`: the folders by name."""
    on: dict[int, list[str]] = {}
    for place, folder in places.items():
        on.setdefault(os.stat(folder).st_dev, []).append(place)
    found = [(names, shutil.disk_usage(places[names[0]])) for names in on.values()]
    return [Disk(tuple(names), usage.free, usage.total) for names, usage in found]


@dataclass(frozen=True)
class _Progress:
    """A run's round, whether it is open, and since when, by the monotonic clock."""

    round: int
    open: bool
    since: float


class Alerts:
    """The current alerts. `conditions` has a sentence for each (kind, run). `notify` is called when one begins or ends
    (kind, message, state, run, round)."""

    def __init__(
        self,
        clock: Callable[[], float],
        notify: Callable[[str, str, str, str | None, int | None], None],
        disks: Callable[[Mapping[str, Path]], list[Disk]] = disks,
    ) -> None:
        self._clock, self._notify, self.disks = clock, notify, disks
        self.conditions: dict[Key, str] = {}
        self._progress: dict[str, _Progress] = {}
        self._check_at = -float("inf")

    def check(
        self,
        runs: Sequence[LiveRun],
        places: Mapping[str, Path],
        backups_trouble: str | None,
        *,
        disk_is_full: bool,
    ) -> None:
        """Check everything, unless the last check was less than CHECK_S ago. `backups_trouble`: what is wrong with the
        scheduled backups."""
        if self._clock() < self._check_at:
            return
        self._check_at = self._clock() + CHECK_S
        found: dict[Key, str | None] = {("run-stalled", run.name): self._stalled(run) for run in runs}
        found["disk-filling", None] = self._filling(places, disk_is_full=disk_is_full)
        found["backup-failed", None] = None if backups_trouble is None else scrubbed(backups_trouble)
        before, self.conditions = self.conditions, {key: text for key, text in found.items() if text is not None}
        self._progress = {run.name: self._progress[run.name] for run in runs if run.name in self._progress}
        by_name = {run.name: run for run in runs}
        for kind, name in self.conditions.keys() - before.keys():
            round_ = None if name is None else by_name[name].round
            self._notify(kind, self.conditions[kind, name], "firing", name, round_)
        for kind, name in before.keys() - self.conditions.keys():
            if name is None:
                self._notify(kind, ENDED[kind], "resolved", None, None)
            elif name in by_name:  # otherwise the run was removed
                self._notify(kind, reason_of(by_name[name]), "resolved", name, by_name[name].round)

    def _stalled(self, run: LiveRun) -> str | None:
        with run.lock:
            now, opening, round_ = self._clock(), run.open, run.round
            if run.ended or (opening is None and run.state is not RunState.RUNNING):
                self._progress.pop(run.name, None)
                return None
            since = opening.opened_at if opening is not None else now
            seen = self._progress.get(run.name)
            if seen is None or (seen.round, seen.open) != (round_, opening is not None):
                seen = self._progress[run.name] = _Progress(round_, opening is not None, since)
            reason = reason_of(run)
        open_s = now - seen.since
        if opening is None:
            stalled, what = open_s > NO_ROUND_S, f"no round has been open for {duration_text(open_s)}: {reason}"
        else:
            stalled = open_s > ROUND_S and open_s > 3 * _last_round_s(run)
            what = f"the round has been open for {duration_text(open_s)}: {reason}"
        return what if stalled else None

    def _filling(self, places: Mapping[str, Path], *, disk_is_full: bool) -> str | None:
        if disk_is_full:
            return "the disk is full: uploads are rejected until there is free space"
        below = ROOM if ("disk-filling", None) in self.conditions else FILLING
        full = [each for each in self.disks(places) if each.free < below]
        if not full:
            return None
        return "; ".join(
            f"{each.free:.1%} of the disk with {' and '.join(each.places)} is free ({each.free_bytes / 1e9:.1f} GB)"
            for each in full
        )


def _last_round_s(run: LiveRun) -> float:
    """Return how long the last published round was open; 0 if there is none."""
    with run.context.database.read() as session:
        row = session.execute(
            select(RoundRow.opened_at, RoundRow.closed_at)
            .where(RoundRow.run_id == run.id, RoundRow.closed_at.is_not(None))
            .order_by(RoundRow.round.desc())
            .limit(1)
        ).first()
    return 0.0 if row is None else row.closed_at - row.opened_at
