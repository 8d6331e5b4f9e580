"""A run in memory: what the database says of it, plus what only a living process knows (leases, deadlines).

There is one way to change it, `LiveRun.change`: under the run's lock rows are written, and only once they are committed
the memory changes too; then the run settles (`settling.py`): whatever follows from the change happens at once. Nothing
here is needed to recover: a restart rebuilds it from the database (`restoring.py`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.runs.bell import EVENTS
from coordinator.runs.leases import Leases
from coordinator.runs.rounds import Policy
from coordinator.store.database import Database
from coordinator.store.files import DataDirectory
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
    """What a run needs of the outside: storage, clocks, threads for the heavy work, and a bell for those who wait."""

    database: Database
    data: DataDirectory
    submit: Callable[..., Future[None]]
    ring: Callable[[str, str | None], None]  # run, topic: something changed; whoever waits for that looks again
    storage_full: Callable[[], None]  # a write has failed for want of room
    room: Room  # for payloads in memory
    settle: Callable[["LiveRun"], None]  # bring a run to its fixpoint; called under its lock
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


@dataclass(frozen=True)
class Contributed:
    """An accepted contribution: its weight, and the digest that names its file."""

    tokens: int
    digest: bytes


@dataclass
class Arrival:
    """A contribution in its durable `file` that waits to be committed, and then what came of it."""

    header: ContributionHeader
    file: Path
    digest: bytes
    size: int
    content: memoryview | None
    looked_at: bool = False
    created: bool = False
    error: BaseException | None = None


@dataclass
class Told:
    """A report of a worker, and whether it is in the books."""

    worker: str
    report: RoundReport
    booked: bool = False


@dataclass
class OpenFragment:
    """One fragment of the open round. `contributed`: by worker; `contents`: of those that are in memory as well, until
    they are averaged. Times are of the monotonic clock."""

    state: FragmentState = FragmentState.COLLECTING
    reason: str = "just opened"
    contributed: dict[str, Contributed] = field(default_factory=dict)
    contents: dict[str, memoryview] = field(default_factory=dict)
    quorum_at: float | None = None
    closes_at: float | None = None


@dataclass(frozen=True)
class Given:
    """One worker's assignment for the open round, as the database has it. `units`: half-open ranges."""

    inner_steps: int
    evaluate: bool
    units: list[tuple[int, int]]


@dataclass
class OpenRound:
    """The round that is being worked on. `assigned`: workers that hold an assignment for it.

    `given` and `settled` spare the database what it would answer a thousand workers at once, as the round opens: their
    assignments, and of whom it holds no work units of earlier rounds. `consumed`, what it would answer for every
    fragment: the units of a worker that a contribution to this round has consumed.
    """

    number: int
    opened_at: float
    assigned: set[str]
    fragments: list[OpenFragment]
    given: dict[str, Given] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    consumed: dict[str, list[list[int]]] = field(default_factory=dict)


@dataclass
class Members:
    """Who takes part in a run.

    tokens     hash of a member token -> worker
    metrics    by worker, as its last heartbeat told them
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
    """The publishing of a run's fragments on other threads, by fragment: which have a job at work, and what went wrong.

    `retry_at`: no job begins before, for a fault, such as a full disk, interrupted one. `faults`: what the last one
    failed of, so that it is told once.
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
        self.files = world.data.run(row.name)
        self.lock = threading.RLock()
        self.stepped = threading.Condition(self.lock)  # notified when a fragment of the outer state was stepped
        self._change: Change | None = None  # the one that is being made
        self._topics: list[str | None] = []  # to be rung once the run has settled
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
        self.reports: deque[Told] = deque()  # not booked yet
        self.arrivals: deque[Arrival] = deque()  # contributions to be committed, by whoever gets the lock next
        self.jobs = Jobs()
        self.spoilt: set[tuple[int, int]] = set()  # (round, fragment) of deltas that the disk has lost for good
        self.damage: str | None = None  # why the run cannot go on until its files are restored
        self.verify_at: float | None = world.clock()  # when to look at the files again; None while that is done
        self.closing = False  # the coordinator stops; long work on other threads ends early
        self.events_recorded = 0  # since the last trimming

    # --- the one way to change it ---------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator["Change"]:
        """Change the run: the block writes rows and says what follows in memory; then the run settles.

        Whoever reads the run first and decides by that, holds `lock` around both. An exception from the block or from
        the commit leaves database and memory as they were; one from the settling leaves the change in place, and what
        should have followed follows with the next settling, a fraction of a second later.
        """
        with self.lock:
            with self.transition() as change:
                yield change
            self.settle()

    @contextmanager
    def transition(self) -> Iterator["Change"]:
        """A change that is itself a part of the settling. Holds the lock."""
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
        """Let follow whatever follows from the run's state and the time, and wake those who wait for it."""
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
        """All that the database knows of the run is in memory: from now on it settles."""
        with self.lock:
            self._restored = True
            self.settle()

    # --- what follows from what it holds --------------------------------------------------------------------------

    @property
    def seeded(self) -> bool:
        """Whether state 0 is there."""
        return bool(self.outer)

    def published_rounds(self, fragment: int) -> int:
        """How many deltas of `fragment` are published: the state that they lead to."""
        with self.lock:
            published = self.open is not None and self.open.fragments[fragment].state is FragmentState.PUBLISHED
            return self.round + published

    @property
    def ended(self) -> bool:
        return self.state in (RunState.FINISHED, RunState.STOPPED)

    @property
    def final_digest(self) -> bytes | None:
        """Of the finished run's outer state; None until the coordinator has taken the last outer step itself."""
        last = self.spec.sync.rounds
        if self.state is not RunState.FINISHED or any(round_ != last for round_, _ in self.outer):
            return None
        return model_digest(digest for _, digest in self.outer)


class Change:
    """One change of a run: rows in `session`, and what becomes true in memory once they are committed.

    Whoever holds one holds the run's lock.
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
        """Call `apply`, which changes the run in memory, once the rows are committed; in the order of the calls."""
        self.consequences.append(apply)

    def record(self, kind: str, message: str, **data: Any) -> None:
        """Record an event, in the transaction of what it tells of; whoever follows the events is woken."""
        run = self.run
        logger.info("%s: %s", run.name, message)
        self.session.add(EventRow(run_id=run.id, at=run.world.now(), kind=kind, message=message, data=data))
        run.events_recorded += 1
        self.wake(EVENTS)

    def wake(self, topic: str | None = None) -> None:
        """Wake the long polls of `topic` (None: all of them), and whoever follows the events, once the run has settled;
        they look again."""
        self.topics += [topic, EVENTS]
