"""A run in memory: what the database says of it, plus what only a living process knows (leases, deadlines).

Every change happens under `lock`: first in the database, then here. Nothing here is needed to recover: a restart
rebuilds it from the database (`restoring.py`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.bell import EVENTS
from coordinator.database import Database
from coordinator.files import DataDirectory
from coordinator.leases import Leases
from coordinator.room import Room
from coordinator.rounds import Policy
from coordinator.tables import EventRow, RunRow, WorkerRow
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
    settled: bool = False
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


class LiveRun:
    """One run. Its methods are small; what happens to it is in the modules that the package's docstring lists."""

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
        members = self.spec.members
        self.policy = Policy(
            members.min_workers, members.grace_factor, members.grace_min_s, members.grace_max_s, members.round_max_s
        )
        self.leases = Leases(members.lease_s)
        self.member_tokens: dict[bytes, str] = {}  # token hash -> worker
        self.metrics: dict[str, Metrics] = {}
        self.ready: set[str] = set()  # workers that hold the state of `round` and asked what to do
        self.previous: set[str] = set()  # workers of the round before `round`
        self.open: OpenRound | None = None
        self.seeder: str | None = None
        self.evaluator: str | None = None  # of the final state
        self.reports: deque[Told] = deque()  # not booked yet
        self.deltas: dict[tuple[int, int], bytes] = {}  # (round, fragment) -> digest, of the last rounds published
        self.outer: list[tuple[int, bytes]] = []  # per fragment: round and digest of the coordinator's own state
        self.arrivals: deque[Arrival] = deque()  # contributions to be committed, by whoever gets the lock next
        self.jobs: set[int] = set()  # fragments with a publishing job at work
        self.retry_at: float | None = None  # take up again what a fault, such as a full disk, interrupted
        self.faults: dict[int, str] = {}  # per fragment: what its job last failed of, so that it is told once
        self.spoilt: set[tuple[int, int]] = set()  # (round, fragment) of deltas that the disk has lost for good
        self.damage: str | None = None  # why the run cannot go on until its files are restored
        self.diverged: dict[str, int] = {}  # per worker: the last round in which it held another state
        self.verify_at: float | None = world.clock()  # when to look at the files again; None while that is done
        self.closing = False  # the coordinator stops; long work on other threads ends early
        self.events_recorded = 0  # since the last trimming

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

    def row(self, session: Session) -> RunRow:
        return session.get_one(RunRow, self.id)

    def record(self, session: Session, kind: str, message: str, **data: Any) -> None:
        """An event, in the transaction of what it tells of."""
        logger.info("%s: %s", self.name, message)
        session.add(EventRow(run_id=self.id, at=self.world.now(), kind=kind, message=message, data=data))
        self.events_recorded += 1

    def ring(self) -> None:
        """Something was recorded: whoever follows the events looks again."""
        self.world.ring(self.name, EVENTS)

    def wake(self, topic: str | None = None) -> None:
        """Something changed that long polls of `topic` (None: all of them) wait for; they look again."""
        self.world.ring(self.name, topic)
        if topic is not None:
            self.ring()


def worker_row(run: LiveRun, session: Session, worker: str) -> WorkerRow:
    """The row of a worker that has joined."""
    return session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)).one()
