"""The epochs of the training set: how far each is, and the check that every unit was trained on exactly once.

The check compares two independent records: the ranges of units, which must cover the epoch without gap or overlap, and
the run's count of tokens, which grows with every unit that a contribution consumes.
"""

from collections.abc import Sequence
from itertools import pairwise

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.runs.live_run import Change, LiveRun
from coordinator.store.tables import RunRow, UnitRangeRow
from protocol.messages import EpochInfo, Page


def epochs(run: LiveRun, limit: int, before: int | None) -> Page[EpochInfo]:
    """Return the epochs that were begun, newest first."""
    with run.lock, run.world.database.read() as session:
        next_unit = session.get_one(RunRow, run.id).next_unit
        units = _units_per_epoch(run)
        begun = 1 if units is None else -(-next_unit // units)
        last = begun if before is None else min(begun, before)
        first = max(0, last - limit)
        items = [_epoch(run, session, epoch, units, next_unit) for epoch in reversed(range(first, last))]
    return Page(items=items, next=str(first) if first else None)


def _units_per_epoch(run: LiveRun) -> int | None:
    """Return how many units one epoch has; None if the run has no training set, or not yet."""
    return None if run.model is None or run.model.data is None else run.model.data.units


def _epoch(run: LiveRun, session: Session, epoch: int, units: int | None, next_unit: int) -> EpochInfo:
    start, stop = (0, next_unit) if units is None else (epoch * units, (epoch + 1) * units)
    consumed, assigned = 0, dict[str, int]()
    for row in _ranges(session, run.id, start, stop):
        count = min(row.stop, stop) - max(row.start, start)
        if row.state == "consumed":
            consumed += count
        elif row.worker is not None:
            assigned[row.worker] = assigned.get(row.worker, 0) + count
    free = None if units is None else units - consumed - sum(assigned.values())
    return EpochInfo(epoch=epoch, units=units, consumed=consumed, assigned=dict(sorted(assigned.items())), free=free)


def check_epochs(change: Change) -> None:
    """Check each epoch of which every unit is consumed, unless that was done; record the result as an event."""
    run, session, row = change.run, change.session, change.row
    units = _units_per_epoch(run)
    while units is not None and row.next_unit >= (row.checked_epochs + 1) * units:
        epoch = row.checked_epochs
        ranges = _ranges(session, run.id, epoch * units, (epoch + 1) * units)
        if any(each.state != "consumed" for each in ranges):
            return
        fault = coverage_fault([(each.start, each.stop) for each in ranges], epoch * units, (epoch + 1) * units)
        consumed = session.scalar(
            select(func.sum(UnitRangeRow.stop - UnitRangeRow.start)).where(
                UnitRangeRow.run_id == run.id, UnitRangeRow.state == "consumed"
            )
        )
        if fault is None and (consumed or 0) * run.spec.unit_tokens != row.tokens:
            fault = f"{consumed} units are consumed, but contributions brought {row.tokens / run.spec.unit_tokens:g}"
        if fault is None:
            message = f"epoch {epoch} is complete: each of its {units} units was trained on exactly once"
            change.record("epoch-complete", message, epoch=epoch)
        else:
            change.record("epoch-broken", f"epoch {epoch}: {fault}; this is a fault of Outerstep", epoch=epoch)
        row.checked_epochs += 1


def coverage_fault(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> str | None:
    """Return None if `ranges`, ordered by start, cover [start, stop) exactly once; otherwise what is wrong."""
    inner = [(start, start), *((max(a, start), min(b, stop)) for a, b in ranges), (stop, stop)]
    for (_, end), (begin, _) in pairwise(inner):
        if begin > end:
            return f"units [{end}, {begin}) were never trained on"
        if begin < end:
            return f"units [{begin}, {end}) were trained on twice"
    return None


def _ranges(session: Session, run_id: int, start: int, stop: int) -> Sequence[UnitRangeRow]:
    """Return the ranges that overlap [start, stop), ordered by start."""
    return session.scalars(
        select(UnitRangeRow)
        .where(UnitRangeRow.run_id == run_id, UnitRangeRow.start < stop, UnitRangeRow.stop > start)
        .order_by(UnitRangeRow.start)
    ).all()
