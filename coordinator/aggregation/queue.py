"""The queue of tasks, a table in the database: the leader adds them, aggregators take them and write the results.

Taking a task gives an aggregator a lease, which expires by the database's clock, and a new fencing token. A result with
an older token is rejected. A task whose lease has expired is taken again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, or_, select, update

from coordinator.aggregation.tasks import RESULT, TASK, Advanced, Aggregate, Aggregated, Task
from coordinator.store.lease import FORGOTTEN_S, database_clock
from coordinator.store.tables import AggregatorRow, TaskRow
from protocol import __version__

TASKS, RESULTS = "outerstep_tasks", "outerstep_results"  # channels of the bell: there is a task; a task is done
LEASE_S = 10.0
# How long a task waits for the aggregator that has the fragment's state, before another one derives it (delay
# scheduling: Zaharia et al. 2010, section 3).
PATIENCE_S = 2.0

# What is sent again and again is built once: a statement that is built anew takes ten times as long.
_idle = or_(TaskRow.holder.is_(None), TaskRow.expires_at <= database_clock())
_for_me = or_(TaskRow.preferred.is_(None), TaskRow.preferred == bindparam("taker"))
_waited = or_(TaskRow.token > 0, TaskRow.created_at <= database_clock() - PATIENCE_S)
_free = (
    select(TaskRow.id)
    .where(TaskRow.version == __version__, TaskRow.result.is_(None), TaskRow.failure.is_(None))
    .where(_idle, or_(_for_me, _waited))
    .order_by(TaskRow.urgency, TaskRow.id)
    .limit(1)
    .with_for_update(skip_locked=True)
    .scalar_subquery()
)
_TAKE = (
    update(TaskRow)
    .where(TaskRow.id == _free)
    .values(holder=bindparam("taker"), token=TaskRow.token + 1, expires_at=database_clock() + bindparam("lease_s"))
    .returning(TaskRow.id, TaskRow.token, TaskRow.task)
)
_silent_s = database_clock() - AggregatorRow.seen_at
_AGGREGATORS = (
    select(AggregatorRow.id, AggregatorRow.host, AggregatorRow.version, _silent_s)
    .where(_silent_s < FORGOTTEN_S)
    .order_by(AggregatorRow.id)
)
_REPORT = (
    update(AggregatorRow)
    .where(AggregatorRow.id == bindparam("own_id"))
    .values(host=bindparam("own_host"), version=__version__, seen_at=database_clock())
)


@dataclass(frozen=True)
class Claim:
    """A task that an aggregator has taken. `token`: its fencing token."""

    id: int
    token: int
    task: Task


@dataclass(frozen=True)
class Answer:
    """What has become of a task. `result` and `failure` are None while it is not done.

    attempts  how often it was taken
    holder    the aggregator that has taken it last; None if none has, or if it gave the task back
    idle      True if nobody works on it
    """

    id: int
    attempts: int
    holder: str | None
    idle: bool
    result: Aggregated | Advanced | None
    failure: str | None


@dataclass(frozen=True)
class KnownAggregator:
    """An aggregator. `host`: its machine and process, HOST:PID. `silent_s`: since it was seen, by the database's
    clock."""

    id: str
    host: str
    version: str
    silent_s: float


# --- the leader -------------------------------------------------------------------------------------------------------


def add(connection: Connection, tasks: Sequence[tuple[Task, str | None]]) -> list[int]:
    """Add tasks, each with the aggregator that should rather do it, and return their numbers."""
    rows = [
        {
            "version": __version__,
            "task": task.model_dump_json(),
            "urgency": 0 if isinstance(task, Aggregate) else 1,  # workers wait for deltas
            "preferred": preferred,
        }
        for task, preferred in tasks
    ]
    statement = insert(TaskRow).values(created_at=database_clock())
    found = connection.execute(statement.returning(TaskRow.id, sort_by_parameter_order=True), rows)
    return list(found.scalars())


def answers(connection: Connection, ids: Collection[int]) -> list[Answer]:
    """Return what has become of these tasks."""
    row = TaskRow
    found = connection.execute(
        select(row.id, row.token, row.holder, _idle, row.result, row.failure).where(row.id.in_(ids))
    )
    return [
        Answer(id_, token, holder, bool(is_idle), None if result is None else RESULT.validate_json(result), failure)
        for id_, token, holder, is_idle, result, failure in found
    ]


def withdraw(connection: Connection, ids: Collection[int]) -> set[int]:
    """Remove tasks unless they are done. Return those that are done."""
    unfinished = TaskRow.id.in_(ids), TaskRow.result.is_(None), TaskRow.failure.is_(None)
    connection.execute(delete(TaskRow).where(*unfinished))
    return set(connection.scalars(select(TaskRow.id).where(TaskRow.id.in_(ids))))


def remove(connection: Connection, ids: Collection[int]) -> None:
    """Remove tasks."""
    connection.execute(delete(TaskRow).where(TaskRow.id.in_(ids)))


def clear(connection: Connection) -> None:
    """Remove all tasks. Aggregators that work on one can write no result."""
    connection.execute(delete(TaskRow))


def aggregators(connection: Connection) -> list[KnownAggregator]:
    """Return the aggregators that were seen lately, by id."""
    return [KnownAggregator(*each) for each in connection.execute(_AGGREGATORS)]


# --- aggregators ------------------------------------------------------------------------------------------------------


def take(connection: Connection, holder: str) -> Claim | None:
    """Take the most urgent task that nobody works on. Return None if there is none."""
    found = connection.execute(_TAKE, {"taker": holder, "lease_s": LEASE_S}).one_or_none()
    return None if found is None else Claim(found.id, found.token, TASK.validate_json(found.task))


def renew(connection: Connection, claim: Claim) -> bool:
    """Let the lease last LEASE_S from now. Return False if the task is no longer the claim's."""
    return _update(connection, claim, expires_at=database_clock() + LEASE_S)


def finish(connection: Connection, claim: Claim, result: Aggregated | Advanced) -> bool:
    """Write the result, whose blobs are in the store. Return False, and write nothing, if the task is no longer the
    claim's."""
    return _update(connection, claim, result=result.model_dump_json())


def fail(connection: Connection, claim: Claim, failure: str) -> bool:
    """Give up the task, for the leader to do. Return False if it is no longer the claim's."""
    return _update(connection, claim, failure=failure)


def give_back(connection: Connection, claim: Claim) -> bool:
    """Let another aggregator take the task at once. Return False if it is no longer the claim's."""
    return _update(connection, claim, holder=None)


def _update(connection: Connection, claim: Claim, **values: object) -> bool:
    row = TaskRow
    held = row.id == claim.id, row.token == claim.token, row.holder.is_not(None)
    open_ = row.result.is_(None), row.failure.is_(None)
    return connection.execute(update(row).where(*held, *open_).values(**values)).rowcount == 1


def report(connection: Connection, id_: str, host: str) -> None:
    """Record that an aggregator is alive."""
    found = connection.execute(_REPORT, {"own_id": id_, "own_host": host})
    if not found.rowcount:
        values = {"id": id_, "host": host, "version": __version__}
        connection.execute(insert(AggregatorRow).values(seen_at=database_clock(), **values))
        connection.execute(delete(AggregatorRow).where(AggregatorRow.seen_at < database_clock() - FORGOTTEN_S))


def retire(connection: Connection, id_: str) -> None:
    """Remove an aggregator from the list, because it stops."""
    connection.execute(delete(AggregatorRow).where(AggregatorRow.id == id_))
