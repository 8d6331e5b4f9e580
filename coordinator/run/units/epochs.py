"""The epochs of the training set: the progress of each, and the check that every unit was trained on exactly once.

The check compares two independent records. The ranges of units must cover the epoch without gap or overlap. The token
count of the run (with private data, of the worker) grows with every unit that a contribution consumes.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.run.live_run import Change, LiveRun
from coordinator.run.units.pools import Pool, all_pools
from coordinator.store.tables import UnitRangeRow
from protocol.messages import EpochInfo, Page, UnitRangeInfo


def epochs(run: LiveRun, limit: int, before: int | None) -> Page[EpochInfo]:
    """Return the epochs that have begun, newest first. With private data they are grouped by worker, the last to join
    first.

    Pages are numbered by place: the first unit of the epoch's pool plus the epoch's number. Only places below `before`
    are returned.
    """
    with run.lock:
        pass  # wait until a change in progress is in the database
    with run.context.database.read() as session:
        found = list(islice(_begun(all_pools(session, run), before), limit + 1))
        items = [_epoch(session, pool, epoch) for pool, epoch in found[:limit]]
    return Page(items=items, next=str(_place(*found[limit - 1])) if len(found) > limit else None)


def unit_ranges(run: LiveRun, limit: int, after: int) -> Page[UnitRangeInfo]:
    """Return the ranges that end after unit `after`, ordered by their first unit."""
    with run.lock:
        pass
    with run.context.database.read() as session:
        rows = session.scalars(
            select(UnitRangeRow)
            .where(UnitRangeRow.run_id == run.id, UnitRangeRow.stop > after)
            .order_by(UnitRangeRow.start)
            .limit(limit + 1)
        ).all()
    items = [
        UnitRangeInfo(
            start=row.start,
            stop=row.stop,
            state=row.state,
            worker=row.worker,
            round=row.round,
            consumed_round=row.consumed_round,
        )
        for row in rows[:limit]
    ]
    return Page(items=items, next=str(items[-1].stop) if len(rows) > limit else None)


def _begun(pools: Sequence[Pool], before: int | None) -> Iterator[tuple[Pool, int]]:
    for pool in reversed(pools):
        below = pool.begun if before is None else min(pool.begun, before - pool.first)
        yield from ((pool, epoch) for epoch in reversed(range(below)))


def _place(pool: Pool, epoch: int) -> int:
    return pool.first + epoch


def _epoch(session: Session, pool: Pool, epoch: int) -> EpochInfo:
    start, stop = (pool.first, pool.next) if pool.units is None else _bounds(pool, pool.units, epoch)
    consumed, assigned = 0, dict[str, int]()
    for row in _ranges(session, pool, start, stop):
        count = min(row.stop, stop) - max(row.start, start)
        if row.state == "consumed":
            consumed += count
        elif row.worker is not None:
            assigned[row.worker] = assigned.get(row.worker, 0) + count
    free = None if pool.units is None else pool.units - consumed - sum(assigned.values())
    return EpochInfo(
        worker=pool.worker,
        epoch=epoch,
        first=start,
        units=pool.units,
        consumed=consumed,
        assigned=dict(sorted(assigned.items())),
        free=free,
    )


def _bounds(pool: Pool, units: int, epoch: int) -> tuple[int, int]:
    return pool.first + epoch * units, pool.first + (epoch + 1) * units


def check_epochs(change: Change) -> None:
    """Check each epoch that is completely consumed and was not checked before; record the result as an event."""
    for pool in all_pools(change.session, change.run):
        while pool.units is not None and pool.row.next_unit >= (pool.row.checked_epochs + 1) * pool.units:
            if not _check_epoch(change, pool, pool.units, pool.row.checked_epochs):
                break
            pool.row.checked_epochs += 1


def _check_epoch(change: Change, pool: Pool, units: int, epoch: int) -> bool:
    """Check one epoch and record the result. Return False if some of its units are not consumed yet."""
    start, stop = _bounds(pool, units, epoch)
    ranges = _ranges(change.session, pool, start, stop)
    if any(each.state != "consumed" for each in ranges):
        return False
    fault = coverage_fault([(each.start, each.stop) for each in ranges], start, stop)
    if fault is None:
        fault = _count_fault(change, pool)
    owner = "" if pool.worker is None else f" of {pool.worker}'s own data"
    if fault is None:
        message = f"epoch {epoch}{owner} is complete: each of its {units} units was trained on exactly once"
        change.record("epoch-complete", message, epoch=epoch, worker=pool.worker)
    else:
        message = f"epoch {epoch}{owner}: {fault}; this is a bug in Outerstep"
        change.record("epoch-broken", message, epoch=epoch, worker=pool.worker)
    return True


def _count_fault(change: Change, pool: Pool) -> str | None:
    """Return None if the consumed units agree with the token count; otherwise what is wrong."""
    consumed = change.session.scalar(
        select(func.sum(UnitRangeRow.stop - UnitRangeRow.start)).where(
            UnitRangeRow.run_id == pool.run_id,
            UnitRangeRow.state == "consumed",
            UnitRangeRow.start >= pool.first,
            UnitRangeRow.start < pool.next,
        )
    )
    tokens, unit_tokens = pool.row.tokens, change.run.unit_tokens(pool.worker)
    if (consumed or 0) * unit_tokens == tokens:
        return None
    return f"{consumed} units are consumed, but contributions contained {tokens / unit_tokens:g}"


def coverage_fault(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> str | None:
    """Return None if `ranges`, ordered by start, cover [start, stop) exactly once; otherwise what is wrong."""
    inner = [(start, start), *((max(a, start), min(b, stop)) for a, b in ranges), (stop, stop)]
    for (_, end), (begin, _) in pairwise(inner):
        if begin > end:
            return f"units [{end}, {begin}) were never trained on"
        if begin < end:
            return f"units [{begin}, {end}) were trained on twice"
    return None


def _ranges(session: Session, pool: Pool, start: int, stop: int) -> Sequence[UnitRangeRow]:
    """Return the ranges that overlap [start, stop), ordered by start."""
    return session.scalars(
        select(UnitRangeRow)
        .where(UnitRangeRow.run_id == pool.run_id, UnitRangeRow.start < stop, UnitRangeRow.stop > start)
        .order_by(UnitRangeRow.start)
    ).all()
