"""The pools of work units: one for the run or, with private data, one for each worker's own training set.

Units are dealt, returned and consumed in the same way in every pool (`ledger.py`). With private data each pool has a
separate range of unit numbers, so a number never means two units.
"""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.live_run import LiveRun
from coordinator.store.tables import RunRow, WorkerRow
from protocol.spec.run import UNITS_PER_WORKER


@dataclass(frozen=True)
class Pool:
    """The work units of one training set. `row` counts the units assigned so far and the tokens trained on; `units` is
    the number of units per epoch, None if unknown."""

    row: RunRow | WorkerRow
    units: int | None = None

    @property
    def run_id(self) -> int:
        return self.row.id if isinstance(self.row, RunRow) else self.row.run_id

    @property
    def worker(self) -> str | None:
        """The worker that owns the training set; None if all workers share it."""
        return None if isinstance(self.row, RunRow) else self.row.name

    @property
    def first(self) -> int:
        """The pool's first unit."""
        return 0 if isinstance(self.row, RunRow) else self.row.place * UNITS_PER_WORKER

    @property
    def next(self) -> int:
        """The first unit that was never assigned."""
        return self.first + self.row.next_unit

    @property
    def begun(self) -> int:
        """How many epochs have begun."""
        return 1 if self.units is None else -(-self.row.next_unit // self.units)


def pools_of(session: Session, run: LiveRun, workers: Collection[str]) -> dict[str, Pool]:
    """Return the pool of each of `workers`. All of them must have joined."""
    if not run.spec.data.private:
        return dict.fromkeys(workers, _shared(session, run))
    rows = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name.in_(workers)))
    return {row.name: Pool(row, row.units) for row in rows}


def all_pools(session: Session, run: LiveRun) -> list[Pool]:
    """Return the run's pools, in the order of their units."""
    if not run.spec.data.private:
        return [_shared(session, run)]
    rows = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id).order_by(WorkerRow.place))
    return [Pool(row, row.units) for row in rows]


def _shared(session: Session, run: LiveRun) -> Pool:
    data = None if run.model is None else run.model.data
    return Pool(session.get_one(RunRow, run.id), None if data is None else data.units)
