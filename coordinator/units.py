"""Work units: which were assigned to whom, which were consumed, which are back in the pool.

A unit is one inner step's batch. Units are numbered without end through the epochs of the training set (unit g belongs
to epoch g // units_per_epoch); each is consumed by exactly one accepted contribution. Ranges are half-open.
"""

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from coordinator.tables import RunRow, UnitRangeRow
from protocol.errors import Problem

Range = tuple[int, int]


def assigned_units(session: Session, run_id: int, worker: str, round_: int) -> list[Range]:
    """The units that `worker` got for `round_`, consumed or not."""
    rows = session.scalars(
        select(UnitRangeRow)
        .where(UnitRangeRow.run_id == run_id, UnitRangeRow.worker == worker, UnitRangeRow.round == round_)
        .order_by(UnitRangeRow.start)
    )
    return [(row.start, row.stop) for row in rows]


def assign_units(session: Session, run: RunRow, worker: str, round_: int, count: int) -> list[Range]:
    """Give `worker` `count` units for `round_`: those that came back to the pool first, then new ones."""
    taken: list[Range] = []
    free = session.scalars(
        select(UnitRangeRow)
        .where(UnitRangeRow.run_id == run.id, UnitRangeRow.state == "free")
        .order_by(UnitRangeRow.start)
    ).all()
    for row in free:
        if count == 0:
            break
        stop = min(row.stop, row.start + count)
        if stop < row.stop:
            rest = UnitRangeRow(run_id=run.id, start=stop, stop=row.stop, state="free")
            row.stop = stop
            session.add(rest)
        row.state, row.worker, row.round = "assigned", worker, round_
        taken.append((row.start, stop))
        count -= stop - row.start
    if count:
        new = (run.next_unit, run.next_unit + count)
        session.add(
            UnitRangeRow(run_id=run.id, start=new[0], stop=new[1], state="assigned", worker=worker, round=round_)
        )
        run.next_unit = new[1]
        taken.append(new)
    return taken


def return_units(session: Session, run_id: int, worker: str) -> None:
    """Units that `worker` holds and that shaped no accepted contribution go back to the pool."""
    session.execute(
        update(UnitRangeRow)
        .where(UnitRangeRow.run_id == run_id, UnitRangeRow.worker == worker, UnitRangeRow.state == "assigned")
        .values(state="free", worker=None, round=None)
    )


def consume_units(session: Session, run_id: int, worker: str, round_: int, units: list[list[int]]) -> int:
    """Mark `units` as trained on by this worker's contribution to `round_`; how many they are.

    They must be ranges as they were assigned, each listed once. The fragments of one contribution name the same units,
    so units that this very round consumed are accepted again. Raises Problem `units-not-held` otherwise.
    """
    held = {
        row.start: row
        for row in session.scalars(
            select(UnitRangeRow).where(
                UnitRangeRow.run_id == run_id,
                UnitRangeRow.worker == worker,
                or_(UnitRangeRow.state == "assigned", UnitRangeRow.consumed_round == round_),
            )
        )
    }
    for start, stop in units:
        row = held.pop(start, None)
        if row is None or row.stop != stop:
            raise Problem(
                "units-not-held",
                f"work units [{start}, {stop}) are not assigned to {worker}, were used before, or are listed twice",
            )
        row.state, row.consumed_round = "consumed", round_
    return sum(stop - start for start, stop in units)
