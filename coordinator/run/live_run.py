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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.bell import EVENTS
from coordinator.run.members import Members
from coordinator.run.open_round import OpenRound
from coordinator.run.outer import OuterState
from coordinator.run.pacing import Paces
from coordinator.run.tally import Tally
from coordinator.screening.likeness import Likeness
from coordinator.screening.measuring import Found
from coordinator.store import audit
from coordinator.store.blobs import Blobs, RunNames
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database, Fault
from coordinator.store.identity import Actor
from coordinator.store.payloads import MemoryBudget
from coordinator.store.tables import EventRow, RunRow, WorkerRow
from outerstep.common import tracing
from protocol.digest import model_digest
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import DataSummary, FrozenSummary, RoundReport, RunState
from protocol.spec.run import RunSpec
from protocol.wire import ContributionHeader

logger = logging.getLogger(__name__)

LOOK_S = 1.0


# Events of lost and spoilt files, of models that are not what they should be, and of what stands still: warnings.
ALARMING = frozenset(
    {
        "backup-failed",
        "contribution-lost",
        "corrupt",
        "diverged",
        "epoch-broken",
        "evaluations-differ",
        "fault",
        "mended",
        "rederived",
        "seeder-silent",
        "spoilt",
        "storage-full",
        "storage-unavailable",
        "suspected",
    }
)


@dataclass(frozen=True)
class World:
    """What a run needs from outside: storage, clocks, threads for the heavy work, and a bell for those who wait."""

    database: Database
    data: DataDirectory
    blobs: Blobs
    submit: Callable[..., Future[None]]
    ring: Callable[[str, str | None], None]  # run, topic (None: all): wake the long polls that wait for it
    storage_failed: Callable[[BaseException], Fault | None]  # note an error of a write: what is wrong with the disk
    storage_fault: Callable[[], Fault | None]  # what is wrong with disk or database now
    memory: MemoryBudget  # for payloads
    closing: threading.Event  # the coordinator stops: long work on other threads ends early
    settle: Callable[["Settling"], None]  # bring a run to its fixpoint
    # Session, run, kind, message, data of an event: notify of it, and return what follows once it is committed.
    notify: Callable[[Session, str, str, str, dict[str, Any]], Callable[[], None] | None]
    secret: bytes  # from which the keys of sketches come (screening/measuring.py)
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


@dataclass
class Arrival:
    """A contribution that waits, as the durable blob `name`, to be committed; once `processed`, what came of it."""

    header: ContributionHeader
    name: str
    digest: bytes
    size: int
    content: memoryview | None
    found: Found | None
    processed: bool = False
    created: bool = False
    error: BaseException | None = None


@dataclass
class QueuedReport:
    """A report of a worker, and whether it is in the database yet."""

    worker: str
    report: RoundReport
    booked: bool = False


class Model(BaseModel, frozen=True, from_attributes=True):
    """What is trained, as the first worker has fixed it. `data`: its training set; None if the run has none. `frozen`:
    the parameters that are not trained; None where there are none, or the first worker did not say."""

    layout: Layout
    data: DataSummary | None
    frozen: FrozenSummary | None = None


class LiveRun:
    """One run. Its methods are small; what happens to it is in the modules of `runs`, `sync` and `upkeep`.

    Whoever reads several things that must be true together, or decides by what it has read, holds `lock` meanwhile. It
    can be taken again by whoever has it.
    """

    def __init__(self, row: RunRow, world: World) -> None:
        self.id = row.id
        self.name, self.created_at = row.name, row.created_at
        self.spec = RunSpec.model_validate(row.spec)
        self.world = world
        self.blobs, self.names = world.blobs, RunNames(row.name)
        self.lock = threading.RLock()

        self._state = RunState(row.state)
        self._round, self._step = row.round, row.step
        self._model = None if row.layout is None else Model.model_validate(row)
        self._open: OpenRound | None = None
        self._change: Change | None = None  # the one in progress
        self._topics: list[str | None] = []  # to be woken once the run has settled
        self._restored = False
        self._removed = False

        self.members = Members(self.spec.members.lease_s)
        self.paces = Paces(self.spec.sync)
        self.outer = OuterState(world.data.states(row.name), self.lock)
        self.reports: deque[QueuedReport] = deque()  # not booked yet
        self.arrivals: deque[Arrival] = deque()  # contributions to be committed, by whoever gets the lock next
        self.events_recorded = 0  # since the last trimming
        self.likeness = Likeness()
        self.tally = Tally()

    def traced(self, name: str, number: int, fragment: int) -> AbstractContextManager[None]:
        """Trace the block, where there are traces, as a part of round `number`."""
        return tracing.round_span(name, self.name, self.created_at, number, fragment=fragment)

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Hold the lock within the block, if it can be had within LOOK_S: what is read is then of one moment. It is
        kept for longer while a write waits for a locked database, and that has to be shown."""
        held = self.lock.acquire(timeout=LOOK_S)
        try:
            yield
        finally:
            if held:
                self.lock.release()

    # --- the one way to change it ---------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator["Change"]:
        """Change the run: the block writes rows and says what changes in memory; then the run settles.

        A caller whose change depends on what it has read of the run holds `lock` around both. An exception from the
        block or from the commit leaves database and memory as they were. One from the settling leaves the change in
        place; what should have followed from it follows at the next tick, a fraction of a second later.
        """
        with self.lock:
            with self._transition() as change:
                yield change
            self.settle()

    @contextmanager
    def _transition(self) -> Iterator["Change"]:
        if self._removed:
            raise Problem("not-found", f"the run {self.name} was removed")
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
                self.world.settle(Settling(self, self._transition))
            finally:
                self._wake()

    def _wake(self) -> None:
        topics, self._topics = self._topics, []
        for topic in [None] if None in topics else dict.fromkeys(topics):
            self.world.ring(self.name, topic)

    def restored(self, opening: OpenRound | None = None) -> None:
        """Let the run settle from now on: it is in memory as the database has it, `opening` as its open round."""
        with self.lock:
            self._open, self._restored = opening, True
            self.settle()

    def suspend(self) -> None:
        """Let nothing follow from changes until `restored`: the run in memory is about to be made anew. Under its lock,
        which the caller keeps until then."""
        self._restored = False

    def removed(self) -> None:
        """Let nothing change or settle from now on, whoever still has this run: its rows have gone."""
        with self.lock:
            self._removed, self._restored = True, False
            self.world.ring(self.name, None)

    # --- what a change sets ---------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """What the operator, or the last round, has set it to."""
        return self._state

    @property
    def round(self) -> int:
        """The open or next round, and so the number of the state from which it starts."""
        return self._round

    @property
    def step(self) -> int:
        """The inner steps of the schedule before that round (`steps.py`)."""
        return self._step

    @property
    def model(self) -> Model | None:
        """What is trained; None until the first worker has joined."""
        return self._model

    @property
    def open(self) -> OpenRound | None:
        """The open round; None between two rounds."""
        return self._open

    # --- what follows from what it holds --------------------------------------------------------------------------

    @property
    def seeded(self) -> bool:
        """True once state 0 is complete."""
        return bool(self.outer.states)

    @property
    def trains_on_the_same(self) -> bool:
        """True if all workers train on one data set, whose units the coordinator assigns; False if each of them may
        have its own."""
        return self.model is not None and self.model.data is not None and self.model.data.digest is not None

    @property
    def ended(self) -> bool:
        """True if the run is finished or stopped."""
        return self.state in (RunState.FINISHED, RunState.STOPPED)

    @property
    def final_digest(self) -> bytes | None:
        """The finished run's model digest; None until the coordinator has taken the last outer step itself."""
        if self.state is not RunState.FINISHED or any(each.round != self.round for each in self.outer.states):
            return None
        return model_digest(each.digest for each in self.outer.states)


@dataclass(frozen=True)
class Settling:
    """A run as it settles: whoever has one has the run's lock, and `change` makes a change that is part of that."""

    run: LiveRun
    change: Callable[[], AbstractContextManager["Change"]]


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

    def set_state(self, state: RunState) -> None:
        """Set the run's state."""
        self.row.state = state
        self.then(partial(setattr, self.run, "_state", state))

    def set_model(self, model: Model) -> None:
        """Fix what is trained."""
        dumped = model.model_dump()
        self.row.layout, self.row.data, self.row.frozen = dumped["layout"], dumped["data"], dumped["frozen"]
        self.then(partial(setattr, self.run, "_model", model))

    def begin_round(self, opening: OpenRound) -> None:
        """Open the round whose rows were added."""
        self.then(partial(setattr, self.run, "_open", opening))
        self.then(self.run.members.begin_round)

    def end_round(self, opening: OpenRound, steps: int) -> None:
        """End the open round, which has taken the schedule on by `steps`: the run is at the next state."""
        step = self.run.step + steps
        self.row.round, self.row.step = opening.number + 1, step
        self.then(partial(setattr, self.run, "_open", None))
        self.then(partial(self.run.members.end_round, opening.assigned, opening.contributed))
        seen = opening.paces(self.run.spec.unit_tokens)
        self.then(partial(self.run.paces.see, seen, self.run.members.claimed_paces()))
        self.then(partial(setattr, self.run, "_round", opening.number + 1))
        self.then(partial(setattr, self.run, "_step", step))

    def go_back(self, round_: int, step: int) -> None:
        """Make `round_` the next round, whatever was open. `step`: the inner steps of the schedule before it."""
        self.row.round, self.row.step = round_, step
        self.then(partial(setattr, self.run, "_open", None))
        self.then(partial(setattr, self.run, "_round", round_))
        self.then(partial(setattr, self.run, "_step", step))
        self.then(self.run.outer.forget_history)

    def record(self, kind: str, message: str, **data: Any) -> None:
        """Record an event, in the same transaction as the rows, and wake those who follow the events."""
        run = self.run
        about = {"run": run.name, "worker": data.get("worker"), "round": data.get("round")}
        level = logging.WARNING if kind in ALARMING else logging.INFO
        self.session.add(EventRow(run_id=run.id, at=run.world.now(), kind=kind, message=message, data=data))
        # Once it is committed: on a full disk the same event is tried again many times.
        self.then(partial(logger.log, level, "%s: %s", run.name, message, extra=about))
        self.then(partial(_count_event, run, kind))
        if (committed := run.world.notify(self.session, run.name, kind, message, data)) is not None:
            self.then(committed)
        self.wake(EVENTS)

    def audit(self, by: Actor, act: str, message: str) -> None:
        """Add an entry to the audit, in the same transaction."""
        audit.note(self.session, self.run.world.now(), by, act, message, self.run.name)

    def wake(self, topic: str | None = None) -> None:
        """Once the run has settled, wake those who wait for `topic` (None: all) and those who follow the events."""
        self.topics += [topic, EVENTS]


def _count_event(run: LiveRun, kind: str) -> None:
    run.events_recorded += 1
    run.tally.events[kind] += 1
