"""The aggregator: a process that takes tasks from the queue and does them. It is stateless: what it has on disk is a
cache, and whatever it leaves undone, another one does.

A task's blobs are in the store before its result is written. Blobs are put if absent, and the same task gives the same
bytes, so it does no harm if two aggregators do it, or one that was believed dead.
"""

import hashlib
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from coordinator.aggregation import queue
from coordinator.aggregation.fragment import aggregate_fragment, store_delta
from coordinator.aggregation.queue import RESULTS, Claim
from coordinator.aggregation.state_file import StateReader
from coordinator.aggregation.states import States
from coordinator.aggregation.tasks import Advanced, Aggregate, Aggregated, Task
from coordinator.store import postgresql
from coordinator.store.blobs import Blobs, RunNames, StoreOutage
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import check_schema
from coordinator.store.opening import shared_bucket
from coordinator.store.payloads import MemoryBudget
from coordinator.store.postgresql import Deployment
from protocol.errors import OuterstepError, Transient

STATES = "states"  # in the data directory
RENEW_S = 2.0
LOOK_S = 1.0  # between looks at the queue, if nobody rings
REST_S = 2.0  # after a fault of the database or the store
STOP_S = 5.0  # for a task in hand, when the process stops
STALLED_S = 120.0  # without progress, until a task is left to another aggregator
MOST_AT_ONCE = 4  # tasks

logger = logging.getLogger(__name__)


class Superseded(Exception):
    """The task is no longer this aggregator's."""


class Aggregator:
    """Does tasks, on several threads, until it is stopped.

    `connect` opens a connection to the database in autocommit mode. `secret` reads the deployment's. `ring` notifies
    the leader that a task is done.
    """

    def __init__(
        self,
        id_: str,
        connect: Callable[[], Connection],
        blobs: Blobs,
        states: States,
        secret: Callable[[Connection], bytes],
        ring: Callable[[Connection], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id, self._clock = id_, clock
        self._connect, self._blobs, self._states, self._secret, self._ring = connect, blobs, states, secret, ring
        self._memory = MemoryBudget(contributions_bytes=0)  # has the deltas that this process has just made
        self._lock = threading.Lock()
        self._held: dict[int, Claim] = {}  # by the thread that works on it
        self._progressed: dict[int, float] = {}  # by thread: when it last began a part of its task
        self._stopping, self._awake = threading.Event(), threading.Event()

    # --- tasks ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take a task and do it. Return False if there is none. Raises SQLAlchemyError and StoreOutage."""
        with self._connect() as connection:
            claim = queue.take(connection, self.id)
            if claim is None:
                return False
            secret = self._secret(connection)
        own = threading.get_ident()
        with self._lock:
            self._held[own], self._progressed[own] = claim, self._clock()
        try:
            self._finish(claim, partial(queue.finish, result=self._done(claim.task, secret)))
        except Superseded:
            logger.info("task %d was taken by another aggregator, or is no longer wanted", claim.id)
        except (StoreOutage, SQLAlchemyError):
            self._finish(claim, queue.give_back)
            raise
        except Exception as error:  # the leader does it, and reports what is wrong
            logger.exception("task %d failed: %s of run %s", claim.id, claim.task.kind, claim.task.run)
            self._finish(claim, partial(queue.fail, failure=f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._held.pop(own, None)
        return True

    def _finish(self, claim: Claim, write: Callable[[Connection, Claim], bool]) -> None:
        with self._connect() as connection:
            if write(connection, claim):
                self._ring(connection)
            else:
                logger.info("task %d is no longer this aggregator's, so its result is dropped", claim.id)

    def _done(self, task: Task, secret: bytes) -> Aggregated | Advanced:
        if not isinstance(task, Aggregate):
            return self._states.advance(task, self._blobs, self._memory, self._check)
        delta = aggregate_fragment(task, self._blobs, secret, partial(self._theta_norm, task), check=self._check)
        return store_delta(task, delta, self._blobs, self._memory)

    def _theta_norm(self, task: Aggregate) -> float:
        if task.state is None:
            raise OuterstepError("no checkpoint has the fragment's state")
        name = RunNames(task.run).checkpoint(task.round, task.fragment, task.state)
        with StateReader(self._blobs.open(name)) as state:
            return state.theta_norm()

    def _check(self) -> None:
        """Note that this thread makes progress. Raise Superseded if its task is no longer this aggregator's."""
        own = threading.get_ident()
        with self._lock:
            if own not in self._held:
                raise Superseded
            self._progressed[own] = self._clock()

    def renew(self) -> None:
        """Report that this aggregator is alive, and renew its leases on tasks that make progress. Raises
        SQLAlchemyError."""
        with self._connect() as connection:
            queue.report(connection, self.id, f"{socket.gethostname()}:{os.getpid()}")
            with self._lock:
                stalled = self._clock() - STALLED_S
                held = [(thread, each) for thread, each in self._held.items() if self._progressed[thread] > stalled]
            for thread, claim in held:
                if not queue.renew(connection, claim):
                    with self._lock:
                        if self._held.get(thread) == claim:
                            del self._held[thread]

    def _retire(self) -> None:
        with self._connect() as connection:
            with self._lock:
                held, self._held = list(self._held.values()), {}
            for claim in held:
                queue.give_back(connection, claim)
            queue.retire(connection, self.id)

    # --- threads --------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Do tasks until it is stopped."""
        while not self._stopping.is_set():
            try:
                if not self.step():
                    self._awake.wait(LOOK_S)
                    self._awake.clear()
            except (StoreOutage, SQLAlchemyError) as error:
                logger.warning("%s; trying again in %.0f s", postgresql.first_line(error), REST_S)
                self._stopping.wait(REST_S)

    def wake(self) -> None:
        """Look for a task now."""
        self._awake.set()

    def stop(self) -> None:
        """Take no more tasks, and give back those in hand."""
        self._stopping.set()
        self._awake.set()
        try:
            self._retire()
        except SQLAlchemyError as error:
            logger.info("the leases expire by themselves: %s", postgresql.first_line(error))


# --- the process ------------------------------------------------------------------------------------------------------


def serve(
    url: URL, bucket: str | None, data_dir: Path, stopping: threading.Event, ready: Callable[[str], object]
) -> None:
    """Do tasks of the coordinators that share the database at `url`, until `stopping` is set. `bucket`: the URL of
    theirs; None for the one in the database. `ready` is called with it once this aggregator can take tasks.

    Raises OuterstepError if the database, the bucket or the data directory cannot be used, or if the blobs are moved.
    """
    id_, count = id_of(data_dir), min(os.cpu_count() or 1, MOST_AT_ONCE)
    named = postgresql.named(url, id_, postgresql.AGGREGATOR)
    with ExitStack() as opened:
        engine = postgresql.engine_of(named, connections=count + 1)
        opened.callback(engine.dispose)
        deployment = _deployment(engine)
        assert deployment.bucket is not None
        owner, place = deployment.bucket
        data = opened.enter_context(closing(DataDirectory(data_dir, "aggregator or coordinator")))
        states = data.root / STATES
        shutil.rmtree(states, ignore_errors=True)
        aggregator = Aggregator(
            id_,
            engine.connect,
            shared_bucket(owner, bucket or place, data),
            States(states, shutil.disk_usage(data.root).free // 2),
            lambda connection: postgresql.deployment(connection).secret,
            partial(postgresql.ring, channel=RESULTS),
        )
        ready(bucket or place)
        check = partial(_check_bucket, engine, owner, place if bucket is None else None)
        _run(aggregator, named, count, stopping, check)


def id_of(data_dir: Path) -> str:
    """Return the id of the aggregator with this data directory, which one process can use at a time: so the next one
    takes the place of a process that has crashed."""
    return hashlib.sha256(f"{socket.gethostname()}:{data_dir.resolve()}".encode()).hexdigest()[:16]


def _run(aggregator: Aggregator, url: URL, count: int, stopping: threading.Event, check: Callable[[], object]) -> None:
    """Run the aggregator's threads until `stopping` is set. Raises what `check` raises, which is called every
    RENEW_S."""
    threads = [threading.Thread(target=aggregator.work, name=f"task {index}", daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    fault = ""
    with closing(postgresql.Bell(url, queue.TASKS, aggregator.wake)):
        try:
            while not stopping.is_set():
                try:
                    aggregator.renew()
                    check()
                    fault = ""
                except SQLAlchemyError as error:  # the leases expire meanwhile
                    if fault != postgresql.first_line(error):
                        fault = postgresql.first_line(error)
                        logger.warning("the database cannot be asked: %s", fault)
                stopping.wait(RENEW_S)
        finally:
            aggregator.stop()
            for thread in threads:
                thread.join(STOP_S)


def _deployment(engine: Engine) -> Deployment:
    """Raises OuterstepError if the database cannot be used; Transient if it may be usable later, or if the coordinators
    have no bucket yet."""
    try:
        check_schema(engine)
        with engine.connect() as connection:
            found = postgresql.deployment(connection)
    except DBAPIError as error:
        raise postgresql.unusable(f"the database {engine.url!r}", error) from error
    if found.bucket is None:
        raise Transient("the coordinators of this database have no bucket yet: start one first, with --blobs URL")
    return found


def _check_bucket(engine: Engine, owner: str, url: str | None) -> None:
    """Raise Transient if the blobs are in the bucket of another owner now, or at another URL; None: at any."""
    with engine.connect() as connection:
        now = postgresql.deployment(connection).bucket
    if now is None or now[0] != owner or url not in (None, now[1]):
        raise Transient("the blobs are in another bucket now: start the aggregator again")
