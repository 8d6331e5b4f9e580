"""A run in memory: what the database says of it, plus what only a living process knows (leases, deadlines).

There is one way to change it, `LiveRun.change`: under the run's lock the rows are written, and only once they are
committed the memory changes too; then the run settles (`settling.py`): whatever follows from the change happens at
once. Nothing here is needed to recover: a restart rebuilds it from the database (`restoring.py`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.runs.bell import EVENTS
from coordinator.runs.leases import Leases
from coordinator.runs.rounds import Policy
from coordinator.store.blobs import Blobs, RunNames
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.store.tables import EventRow, RunRow, WorkerRow
from coordinator.tuning.room import Room
from protocol.digest import model_digest
from protocol.fragments import Layout
from protocol.messages import DataSummary, FragmentState, Metrics, RoundReport, RunState
from protocol.spec import RunSpec, parse_spec
from protocol.wire import ContributionHeader

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """What a run needs from outside: storage, clocks, threads for the heavy work, and a bell for those who wait."""

    database: Database
    data: DataDirectory
    blobs: Blobs
    submit: Callable[..., Future[None]]
    ring: Callable[[str, str | None], None]  # run, topic (None: all): wake the long polls that wait for it
    storage_full: Callable[[], None]  # to be called when a write found the disk full
    room: Room  # for payloads in memory
    settle: Callable[["LiveRun"], None]  # bring a run to its fixpoint; called under its lock
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


@dataclass(frozen=True)
class AcceptedContribution:
    """An accepted contribution: its weight, and the digest that names its blob."""

    tokens: int
    digest: bytes


@dataclass
class Arrival:
    """A contribution that waits, as the durable blob `name`, to be committed; once `processed`, what came of it."""

    header: ContributionHeader
    name: str
    digest: bytes
    size: int
    content: memoryview | None
    processed: bool = False
    created: bool = False
    error: BaseException | None = None


@dataclass
class QueuedReport:
    """A report of a worker, and whether it is in the database yet."""

    worker: str
    report: RoundReport
    booked: bool = False


@dataclass
class OpenFragment:
    """One fragment of the open round. Times are of the monotonic clock.

    contributed   the accepted contributions, by worker
    contents      the payloads of those that are also in memory, by worker, until they are averaged
    """

    state: FragmentState = FragmentState.COLLECTING
    reason: str = "just opened"
    contributed: dict[str, AcceptedContribution] = field(default_factory=dict)
    contents: dict[str, memoryview] = field(default_factory=dict)
    quorum_at: float | None = None
    closes_at: float | None = None


@dataclass(frozen=True)
class RoundAssignment:
    """One worker's assignment for the open round, as in the database. `units`: half-open ranges."""

    inner_steps: int
    evaluate: bool
    units: list[tuple[int, int]]


@dataclass
class OpenRound:
    """The round that is being worked on.

    assigned               workers that hold an assignment for it
    assignments            by worker, as far as they are in memory
    without_earlier_units  workers known to hold no units of earlier rounds
    consumed               by worker: the units that its contribution to this round has consumed

    The last three spare the database the same queries by a thousand workers at once, and for every fragment.
    """

    number: int
    opened_at: float
    assigned: set[str]
    fragments: list[OpenFragment]
    assignments: dict[str, RoundAssignment] = field(default_factory=dict)
    without_earlier_units: set[str] = field(default_factory=set)
    consumed: dict[str, list[list[int]]] = field(default_factory=dict)


@dataclass
class Members:
    """Who takes part in a run.

    tokens     by hash of the member token: the worker
    metrics    by worker, from its last heartbeat
    ready      workers that hold the state of the next round and have asked what to do
    previous   workers of the round before the next or open one
    diverged   by worker: the last round in which it held another state
    """

    leases: Leases
    tokens: dict[bytes, str] = field(default_factory=dict)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    previous: set[str] = field(default_factory=set)
    diverged: dict[str, int] = field(default_factory=dict)


@dataclass
class Jobs:
    """The jobs that publish a run's fragments on other threads.

    running    fragments whose job is at work
    retry_at   by fragment, after a fault such as a full disk: when the next job may begin
    faults     by fragment: why the last job failed, so that an event says it only once
    """

    running: set[int] = field(default_factory=set)
    retry_at: dict[int, float] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)


class LiveRun:
    """One run. Its methods are small; what happens to it is in the modules of `runs`, `sync` and `upkeep`."""

    def __init__(self, row: RunRow, world: World) -> None:
        self.id = row.id
        self.name = row.name
        self.spec: RunSpec = parse_spec(row.spec_toml)
        self.spec_toml = row.spec_toml
        self.spec_digest = row.spec_digest
        self.created_at = row.created_at
        self.state = RunState(row.state)
        self.round = row.round
        self.layout = None if row.layout is None else Layout.model_validate(row.layout)
        self.data = None if row.data is None else DataSummary.model_validate(row.data)

        self.world = world
        self.blobs, self.names = world.blobs, RunNames(row.name)
        self.states = world.data.states(row.name)
        self.lock = threading.RLock()
        self.stepped = threading.Condition(self.lock)  # notified when a fragment of the outer state was stepped
        self._change: Change | None = None  # the one in progress
        self._topics: list[str | None] = []  # to be woken once the run has settled
        self._restored = False

        members = self.spec.members
        self.policy = Policy(
            members.min_workers, members.grace_factor, members.grace_min_s, members.grace_max_s, members.round_max_s
        )
        self.members = Members(Leases(members.lease_s))
        self.open: OpenRound | None = None
        self.seeder: str | None = None
        self.evaluator: str | None = None  # of the final state
        self.outer: list[tuple[int, bytes]] = []  # per fragment: round and digest of the coordinator's own state
        self.deltas: dict[tuple[int, int], bytes] = {}  # (round, fragment) -> digest, of the last rounds published
        self.queued_reports: deque[QueuedReport] = deque()  # not booked yet
        self.arrivals: deque[Arrival] = deque()  # contributions to be committed, by whoever gets the lock next
        self.jobs = Jobs()
        self.lost_deltas: set[tuple[int, int]] = set()  # (round, fragment) of deltas that cannot be made again
        self.damage: str | None = None  # why the run cannot go on until its files are restored
        self.verify_at: float | None = world.clock()  # when to verify the files next; None meanwhile
        self.closing = False  # the coordinator stops; long work on other threads ends early
        self.events_recorded = 0  # since the last trimming

    # --- the one way to change it ---------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator["Change"]:
        """Change the run: the block writes rows and says what changes in memory; then the run settles.

        A caller whose change depends on what it has read of the run holds `lock` around both. An exception from the
        block or from the commit leaves database and memory as they were. One from the settling leaves the change in
        place; what should have followed from it follows at the next tick, a fraction of a second later.
        """
        with self.lock:
            with self.transition() as change:
                yield change
            self.settle()

    @contextmanager
    def transition(self) -> Iterator["Change"]:
        """Make a change that is itself a part of the settling. Under the run's lock."""
        if self._change is not None:
            raise RuntimeError("a change within a change would be committed before what it depends on")
        try:
            with self.world.database.write() as session:
                self._change = change = Change(self, session)
                yield change
        finally:
            self._change = None
        self._topics += change.topics
        for apply in change.consequences:
            apply()

    def settle(self) -> None:
        """Do whatever follows from the run's state and the time (`settling.py`), and wake those who wait for it."""
        with self.lock:
            if not self._restored:
                return
            try:
                self.world.settle(self)
            finally:
                self._wake()

    def _wake(self) -> None:
        topics, self._topics = self._topics, []
        if None in topics:
            self.world.ring(self.name, None)
        else:
            for topic in dict.fromkeys(topics):
                self.world.ring(self.name, topic)

    def restored(self) -> None:
        """Let the run settle from now on: it is in memory as the database has it."""
        with self.lock:
            self._restored = True
            self.settle()

    # --- what follows from what it holds --------------------------------------------------------------------------

    @property
    def seeded(self) -> bool:
        """True once state 0 is complete."""
        return bool(self.outer)

    def published_rounds(self, fragment: int) -> int:
        """Return how many deltas of `fragment` are published, and so the number of the state that they lead to."""
        with self.lock:
            published = self.open is not None and self.open.fragments[fragment].state is FragmentState.PUBLISHED
            return self.round + published

    @property
    def ended(self) -> bool:
        """True if the run is finished or stopped."""
        return self.state in (RunState.FINISHED, RunState.STOPPED)

    @property
    def final_digest(self) -> bytes | None:
        """The finished run's model digest; None until the coordinator has taken the last outer step itself."""
        last = self.spec.sync.rounds
        if self.state is not RunState.FINISHED or any(round_ != last for round_, _ in self.outer):
            return None
        return model_digest(digest for _, digest in self.outer)


class Change:
    """One change of a run: rows in `session`, and the changes in memory that follow once they are committed.

    Whoever has one holds the run's lock.
    """

    def __init__(self, run: LiveRun, session: Session) -> None:
        self.run, self.session = run, session
        self.consequences: list[Callable[[], object]] = []
        self.topics: list[str | None] = []

    @property
    def row(self) -> RunRow:
        """The run's row."""
        return self.session.get_one(RunRow, self.run.id)

    def worker_row(self, worker: str) -> WorkerRow:
        """The row of a worker that has joined."""
        query = select(WorkerRow).where(WorkerRow.run_id == self.run.id, WorkerRow.name == worker)
        return self.session.scalars(query).one()

    def then(self, apply: Callable[[], object]) -> None:
        """Call `apply`, which changes the run in memory, once the rows are committed; several in the order given."""
        self.consequences.append(apply)

    def record(self, kind: str, message: str, **data: Any) -> None:
        """Record an event, in the same transaction as the rows, and wake those who follow the events."""
        run = self.run
        logger.info("%s: %s", run.name, message)
        self.session.add(EventRow(run_id=run.id, at=run.world.now(), kind=kind, message=message, data=data))
        run.events_recorded += 1
        self.wake(EVENTS)

    def wake(self, topic: str | None = None) -> None:
        """Once the run has settled, wake those who wait for `topic` (None: all) and those who follow the events."""
        self.topics += [topic, EVENTS]
