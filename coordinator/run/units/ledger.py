"""Work units: which ones are assigned to which worker, which were consumed, and which have returned to their pool.

A unit is one inner step's batch. The numbers of units continue from epoch to epoch of the training set: unit g belongs
to epoch g // units_per_epoch. Each unit is consumed by exactly one accepted contribution. Ranges are half-open.
`epochs.py` counts and checks them.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.orm import Session

from coordinator.run.units.pools import Pool
from coordinator.store.tables import UnitRangeRow
from outerstep.common.ranges import Range, merged
from protocol.errors import Problem


def assigned_units(session: Session, run_id: int, worker: str, round_: int) -> list[Range]:
    """Return the units that `worker` was assigned for `round_`, consumed or not."""
    rows = session.scalars(
        select(UnitRangeRow)
        .where(UnitRangeRow.run_id == run_id, UnitRangeRow.worker == worker, UnitRangeRow.round == round_)
        .order_by(UnitRangeRow.start)
    )
    return merged([(row.start, row.stop) for row in rows])


def assign_units(session: Session, pool: Pool, worker: str, round_: int, count: int) -> list[Range]:
    """Assign `count` units for `round_` to `worker`: first returned ones, then new ones."""
    return deal_units(session, {worker: pool}, round_, {worker: count})[worker]


def deal_units(
    session: Session, pools: Mapping[str, Pool], round_: int, counts: Mapping[str, int]
) -> dict[str, list[Range]]:
    """Assign units for `round_` to each worker in turn, from the worker's own pool. `counts`: units per worker."""
    free = _free_units(session, pools)
    dealt: dict[str, list[Range]] = {}
    for worker, count in counts.items():
        pool, taken = pools[worker], list[Range]()
        returned = free[pool.first]
        while count and returned:
            row = returned.popleft()
            rest = _split(session, row, min(row.stop, row.start + count))
            if rest is not None:
                returned.appendleft(rest)
            row.state, row.worker, row.round = "assigned", worker, round_
            taken.append((row.start, row.stop))
            count -= row.stop - row.start
        if count:
            start, stop = pool.next, pool.next + count
            session.add(
                UnitRangeRow(run_id=pool.run_id, start=start, stop=stop, state="assigned", worker=worker, round=round_)
            )
            pool.row.next_unit += count
            taken.append((start, stop))
        dealt[worker] = merged(taken)
    return dealt


def _free_units(session: Session, pools: Mapping[str, Pool]) -> dict[int, deque[UnitRangeRow]]:
    """Return the free ranges of `pools`, in order. The keys are the pools' first units."""
    ends = {pool.first: pool.next for pool in pools.values()}
    firsts, free = sorted(ends), defaultdict[int, deque[UnitRangeRow]](deque)
    rows = session.scalars(
        select(UnitRangeRow)
        .where(
            UnitRangeRow.run_id == next(iter(pools.values())).run_id,
            UnitRangeRow.state == "free",
            UnitRangeRow.start >= firsts[0],
            UnitRangeRow.start < ends[firsts[-1]],
        )
        .order_by(UnitRangeRow.start)
    )
    for row in rows:
        first = firsts[bisect_right(firsts, row.start) - 1]
        if row.start < ends[first]:  # otherwise it belongs to a pool in between that is not one of `pools`
            free[first].append(row)
    return free


def workers_with_units(session: Session, run_id: int) -> set[str]:
    """Return the workers that hold assigned units which no accepted contribution has consumed."""
    return set(
        session.scalars(
            select(UnitRangeRow.worker)
            .where(UnitRangeRow.run_id == run_id, UnitRangeRow.state == "assigned", UnitRangeRow.worker.is_not(None))
            .distinct()
        )
    )


def return_units(session: Session, run_id: int, worker: str, before: int | None = None) -> None:
    """Return to the pool the worker's units that no accepted contribution has consumed; only those assigned for rounds
    before `before`, if it is given."""
    _return(session, run_id, before, UnitRangeRow.worker == worker)


def return_unclaimed_units(session: Session, run_id: int, live: Set[str], before: int) -> None:
    """Return to the pool the units assigned for rounds before `before` to workers that are not `live`."""
    _return(session, run_id, before, UnitRangeRow.worker.not_in(live))


def _return(session: Session, run_id: int, before: int | None, whose: ColumnElement[bool]) -> None:
    rows = update(UnitRangeRow).where(UnitRangeRow.run_id == run_id, UnitRangeRow.state == "assigned", whose)
    if before is not None:
        rows = rows.where(UnitRangeRow.round < before)
    session.execute(rows.values(state="free", worker=None, round=None))


def reclaim_units(session: Session, pool: Pool, worker: str, round_: int, carried: Sequence[Sequence[int]]) -> None:
    """Assign the units `carried` to `worker` again, because it still has work on them from rounds before `round_`.

    Units that returned to the pool when its lease ended are in no contribution, so they can be assigned again. Raises
    Problem `units-not-held` if one of the units is assigned to another worker, is in a contribution to an earlier
    round, is listed twice, belongs to another pool, or was dealt to `worker` anew for `round_`.
    """
    listed = sorted((start, stop) for start, stop in carried)
    if any(stop > start for (_, stop), (start, _) in pairwise(listed)):
        raise Problem("units-not-held", f"carried work units are listed twice: {listed[:5]}")
    for start, stop in merged(listed):
        rows = session.scalars(
            select(UnitRangeRow)
            .where(UnitRangeRow.run_id == pool.run_id, UnitRangeRow.start < stop, UnitRangeRow.stop > start)
            .order_by(UnitRangeRow.start)
        ).all()
        at = start
        for row in rows if pool.first <= start and stop <= pool.next else ():
            if row.state == "free":
                _split(session, row, stop)
                own = row if row.start >= start else _split(session, row, start)
                assert own is not None, "the row overlaps [start, stop)"
                own.state, own.worker, own.round = "assigned", worker, round_ - 1
                at = own.stop
            elif row.worker != worker or (row.round or 0) >= round_ or row.consumed_round not in (None, round_):
                break
            else:
                at = row.stop
        if at < stop:
            raise Problem(
                "units-not-held",
                f"of the carried work units [{start}, {stop}), those from {at} on no longer belong to {worker}: they"
                " were used, or assigned to another worker; drop that work",
            )


def return_forgotten_units(
    session: Session, run_id: int, worker: str, round_: int, carried: Sequence[Sequence[int]]
) -> None:
    """Return to the pool the units of rounds before `round_` that `worker` holds without having work on them.

    A slow or absent worker is assigned units of rounds in which it never takes part. While it is live, no other worker
    would train on them.
    """
    earlier = (
        select(UnitRangeRow)
        .where(UnitRangeRow.run_id == run_id, UnitRangeRow.worker == worker, UnitRangeRow.state == "assigned")
        .where(UnitRangeRow.round < round_)
    )
    carried_ranges = merged(sorted((start, stop) for start, stop in carried))
    starts = [start for start, _ in carried_ranges]
    ends = sorted({end for unit_range in carried_ranges for end in unit_range})
    for row in session.scalars(earlier).all():
        for end in reversed(ends[bisect_right(ends, row.start) : bisect_left(ends, row.stop)]):
            _split(session, row, end)
    for row in session.scalars(earlier):
        at = bisect_right(starts, row.start) - 1
        if at < 0 or row.stop > carried_ranges[at][1]:
            row.state, row.worker, row.round = "free", None, None


def consume_units(session: Session, run_id: int, worker: str, round_: int, units: Sequence[Sequence[int]]) -> int:
    """Mark `units` as consumed by this worker's contribution to `round_`. Return how many of them are newly consumed.

    Each unit must be listed once and be assigned to the worker; otherwise raises Problem `units-not-held`. A worker
    that leaves in the middle of a round may name only the first units of a range; the others stay assigned. The
    fragments of one contribution name the same units, so units that this round has already consumed are accepted.
    """
    held = {row.start: row for row in _contributable(session, run_id, worker, round_)}
    consumed = 0
    for start, stop in merged(sorted((start, stop) for start, stop in units)):
        at = start
        while at < stop:
            row = held.pop(at, None)
            if row is None:
                raise Problem(
                    "units-not-held",
                    f"work units [{start}, {stop}) are not assigned to {worker}, were used before, or are listed twice",
                )
            at = row.stop
            if row.state == "assigned":
                _split(session, row, min(row.stop, stop))
                row.state, row.consumed_round = "consumed", round_
                consumed += row.stop - row.start
    return consumed


def count_by_round(
    session: Session, run_id: int, worker: str, round_: int, units: Sequence[Sequence[int]]
) -> Counter[int]:
    """Count those of `units` that the worker's contribution to `round_` may name, by the round of their assignment."""
    rows = _contributable(session, run_id, worker, round_)
    starts, counts = [row.start for row in rows], Counter[int]()
    for start, stop in units:
        for row in rows[max(bisect_right(starts, start) - 1, 0) : bisect_left(starts, stop)]:
            assert row.round is not None  # the row is assigned, or was until `round_` consumed it
            counts[row.round] += max(min(stop, row.stop) - max(start, row.start), 0)
    return +counts  # without zero counts


def _contributable(session: Session, run_id: int, worker: str, round_: int) -> Sequence[UnitRangeRow]:
    """Return the units that `worker` holds, or that its contribution to `round_` has consumed."""
    return session.scalars(
        select(UnitRangeRow)
        .where(
            UnitRangeRow.run_id == run_id,
            UnitRangeRow.worker == worker,
            or_(UnitRangeRow.state == "assigned", UnitRangeRow.consumed_round == round_),
        )
        .order_by(UnitRangeRow.start)
    ).all()


def unconsume_units(session: Session, run_id: int, worker: str, round_: int, *, live: bool) -> int:
    """Undo the consumption of units by the worker's contribution to `round_`, which is lost or left out.

    The units are assigned to `worker` again if it is `live`; otherwise they return to the pool. Return their number.
    """
    rows = session.scalars(
        select(UnitRangeRow).where(
            UnitRangeRow.run_id == run_id, UnitRangeRow.worker == worker, UnitRangeRow.consumed_round == round_
        )
    ).all()
    for row in rows:
        row.state, row.consumed_round = "assigned", None
        if not live:
            row.state, row.worker, row.round = "free", None, None
    return sum(row.stop - row.start for row in rows)


def free_consumed(session: Session, run_id: int, round_: int, units: Sequence[Range]) -> list[Range]:
    """Return to the pool those of `units` that round `round_` has consumed, whose contribution does not count any more.
    The function's result lists them."""
    freed: list[Range] = []
    for start, stop in units:
        rows = session.scalars(
            select(UnitRangeRow)
            .where(UnitRangeRow.run_id == run_id, UnitRangeRow.consumed_round == round_)
            .where(UnitRangeRow.start < stop, UnitRangeRow.stop > start)
        ).all()
        for row in rows:
            _split(session, row, stop)
            own = row if row.start >= start else _split(session, row, start)
            assert own is not None, "the row overlaps [start, stop)"
            own.state, own.worker, own.round, own.consumed_round = "free", None, None, None
            freed.append((own.start, own.stop))
    return freed


def return_since(session: Session, run_id: int, round_: int) -> list[Range]:
    """Return to the pools all assigned units, and the units consumed by `round_` or later rounds. The function's result
    lists the ranges that had been consumed."""
    since = or_(UnitRangeRow.state == "assigned", UnitRangeRow.consumed_round >= round_)
    rows = session.scalars(select(UnitRangeRow).where(UnitRangeRow.run_id == run_id, since)).all()
    consumed = [(row.start, row.stop) for row in rows if row.state == "consumed"]
    for row in rows:
        row.state, row.worker, row.round, row.consumed_round = "free", None, None, None
    return consumed


def merge_adjacent(session: Session, run_id: int, round_: int, settled: int | None = None) -> None:
    """Merge rows of adjacent ranges, so that the table does not grow with the number of workers nor, for long, of
    rounds.

    Free ranges are merged, and ranges consumed by the same round before `round_`. Ranges consumed by different rounds
    are merged if all are before `settled` (None: `round_`), because the run cannot be rolled back that far. Consumed
    rows lose their worker: no contribution can name these units again, and the history of contributions has the worker.
    """
    settled = round_ if settled is None else settled
    rows = session.scalars(
        select(UnitRangeRow)
        .where(
            UnitRangeRow.run_id == run_id,
            or_(UnitRangeRow.state == "free", UnitRangeRow.consumed_round < round_),
        )
        .order_by(UnitRangeRow.start)
    ).all()
    last: UnitRangeRow | None = None
    for row in rows:
        if last is not None and (last.state, last.stop) == (row.state, row.start) and _mergeable(last, row, settled):
            last.stop = row.stop
            if row.consumed_round is not None and last.consumed_round is not None:
                last.consumed_round = max(last.consumed_round, row.consumed_round)
            session.delete(row)
        else:
            last = row
            last.worker = last.round = None


def _mergeable(a: UnitRangeRow, b: UnitRangeRow, settled: int) -> bool:
    """Return True if every possible rollback returns both ranges or neither."""
    if a.consumed_round is None or b.consumed_round is None:
        return True
    return a.consumed_round == b.consumed_round or max(a.consumed_round, b.consumed_round) < settled


def _split(session: Session, row: UnitRangeRow, stop: int) -> UnitRangeRow | None:
    """End `row` at `stop`. Put the units after it, if there are any, into a new row of the same kind and return that
    row."""
    if stop >= row.stop:
        return None
    rest = UnitRangeRow(
        run_id=row.run_id,
        start=stop,
        stop=row.stop,
        state=row.state,
        worker=row.worker,
        round=row.round,
        consumed_round=row.consumed_round,
    )
    session.add(rest)
    row.stop = stop
    return rest
