"""The queue of tasks, a table in the database: the leader adds them, aggregators take them and write the results.

Taking a task gives an aggregator a lease, which expires by the database's clock, and a new fencing token. A result with
an older token is rejected. A task whose lease has expired is taken again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, or_, select, update

from coordinator.aggregation.tasks import RESULT, TASK, Advanced, Aggregate, Aggregated, Task
from coordinator.lease import FORGOTTEN_S, database_clock
from coordinator.store.tables import AggregatorRow, TaskRow
from protocol import __version__

TASKS, RESULTS = "outerstep_tasks", "outerstep_results"  # channels of the bell: there is a task; a task is done
LEASE_S = 10.0
# How long a task waits for the aggregator that has the fragment's state, before another one derives it (delay
# scheduling: Zaharia et al. 2010, section 3).
PATIENCE_S = 2.0


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
    idle = or_(row.holder.is_(None), row.expires_at <= database_clock())
    found = connection.execute(
        select(row.id, row.token, row.holder, idle, row.result, row.failure).where(row.id.in_(ids))
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
    row = AggregatorRow
    silent_s = database_clock() - row.seen_at
    found = select(row.id, row.host, row.version, silent_s).where(silent_s < FORGOTTEN_S)
    return [KnownAggregator(*each) for each in connection.execute(found.order_by(row.id))]


# --- aggregators ------------------------------------------------------------------------------------------------------


def take(connection: Connection, holder: str) -> Claim | None:
    """Take the most urgent task that nobody works on. Return None if there is none."""
    row = TaskRow
    expired = row.expires_at <= database_clock()
    mine = or_(row.preferred.is_(None), row.preferred == holder)
    waited = or_(row.token > 0, row.created_at <= database_clock() - PATIENCE_S)
    free = (
        select(row.id)
        .where(row.version == __version__, row.result.is_(None), row.failure.is_(None))
        .where(or_(row.holder.is_(None), expired), or_(mine, waited))
        .order_by(row.urgency, row.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    taken = (
        update(row)
        .where(row.id == free)
        .values(holder=holder, token=row.token + 1, expires_at=database_clock() + LEASE_S)
        .returning(row.id, row.token, row.task)
    )
    found = connection.execute(taken).one_or_none()
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
    values = {"host": host, "version": __version__, "seen_at": database_clock()}
    found = connection.execute(update(AggregatorRow).where(AggregatorRow.id == id_).values(values))
    if not found.rowcount:
        connection.execute(insert(AggregatorRow).values(id=id_, **values))
        connection.execute(delete(AggregatorRow).where(AggregatorRow.seen_at < database_clock() - FORGOTTEN_S))


def retire(connection: Connection, id_: str) -> None:
    """Remove an aggregator from the list, because it stops."""
    connection.execute(delete(AggregatorRow).where(AggregatorRow.id == id_))
