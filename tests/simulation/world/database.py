"""The database that several coordinators share, as one simulated server in PostgreSQL's place.

It is SQLite, so a transaction is one step and no other comes between; requests to it take time before and after. The
server can be out of reach, also for one machine alone, and a commit may lose its reply: then it has happened, or it has
not. What it has committed lasts.
"""

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import OperationalError

from coordinator.store import postgresql, sqlite
from tests.simulation.world.machine import Machine
from tests.simulation.world.primitives import Like
from tests.simulation.world.scheduler import Group, Scheduler

EPOCH = 1_700_000_000.0
SILENT_S = 10.0  # until a connection is given up whose other end says nothing
NAME = "database"


class DatabaseNode:
    """The server. `loses`: the chance that a commit loses its reply. `machine_of`: whose process a group is."""

    serving: ClassVar["DatabaseNode"]  # the one of the simulation that runs in this process

    def __init__(
        self,
        scheduler: Scheduler,
        rng: random.Random,
        served_dir: Path,
        machine_of: Callable[[Group], Machine | None],
    ) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.down_until = self.slow_until = 0.0
        self.loses = 0.0
        self.faults: dict[str, int] = {}
        self.url, self.machine_of = sqlite.url_in(served_dir), machine_of

    def serve(self) -> None:
        """Be the server of this process's simulation."""
        for engine in shared_engines(self.url):
            engine.dispose()  # closes the files of the one before
        DatabaseNode.serving = self

    def clock(self) -> float:
        """Its own, which is right."""
        return EPOCH + self.scheduler.now

    def request(self, *, writing: bool = False) -> None:
        """A request of the running task reaches the server, if it gets there. `writing`: a transaction that does."""
        self.scheduler.check_alive()
        group = self.scheduler.current.group
        if group.indivisible:
            return  # it is part of a transaction that has begun
        slow = self.scheduler.now < self.slow_until
        machine = self.machine_of(group)
        if writing and machine is not None and machine.freeze_s:
            group.frozen_until, machine.freeze_s = self.scheduler.now + machine.freeze_s, 0.0
        self.scheduler.sleep(self.rng.uniform(0, 2.0 if slow else 0.01))
        if machine is not None and machine.is_cut(NAME):
            self.scheduler.sleep(self.rng.choice([0.0, SILENT_S]))
            raise OperationalError("", None, self._fault("statement lost"))
        if self.scheduler.now < self.down_until:
            raise OperationalError("", None, self._fault("connection refused"))

    def commit(self, connection: Any) -> None:
        """A transaction ends."""
        lost = self.rng.random() < self.loses
        if lost and self.rng.random() < 0.5:
            raise self._fault("commit lost")  # its client rolls back
        connection.commit()
        if lost:
            raise self._fault("reply of a commit lost")

    def _fault(self, what: str) -> sqlite3.OperationalError:
        self.faults[what] = self.faults.get(what, 0) + 1
        error = sqlite3.OperationalError(f"simulated: {what}")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        return error

    def statements(self) -> "_Statements":
        """A connection in which each statement commits by itself."""
        return _Statements(self, self.url)

    def module(self) -> Like:
        """`coordinator.store.postgresql`, as far as it is used apart from `Database`. Nobody is ever notified, so this
        shows that looking now and then is enough."""
        return Like(
            postgresql,
            named=lambda url, *_: url,
            engine_of=lambda *_, **__: self.statements(),
            Bell=lambda *_: SimpleNamespace(close=lambda: None),
            ring=lambda *_: None,
        )


class _Statements:
    """An engine in which each statement commits by itself."""

    def __init__(self, database: DatabaseNode, url: URL) -> None:
        self._database, (_, self._writing) = database, shared_engines(url)
        self.dialect = self._writing.dialect

    @contextmanager
    def connect(self) -> Iterator["_Statements"]:
        yield self

    def dispose(self) -> None:
        pass

    def execute(self, statement: Any, values: dict[str, Any] | None = None) -> Any:
        self._database.request()
        with self._writing.begin() as connection:
            result = connection.execute(statement, values)
            return result.freeze()() if result.returns_rows else SimpleNamespace(rowcount=result.rowcount)


@cache
def shared_engines(url: URL) -> tuple[Engine, Engine]:
    """One pair for all simulations of this process, so that no statement is compiled twice."""
    reading, writing = sqlite.engines(url)

    @event.listens_for(reading, "connect")
    def add_clock(connection: sqlite3.Connection, _: object) -> None:
        connection.create_function("database_clock", 0, lambda: DatabaseNode.serving.clock())

    reading.dialect.do_commit = lambda connection: DatabaseNode.serving.commit(connection)  # type: ignore[method-assign, assignment]
    return reading, writing
