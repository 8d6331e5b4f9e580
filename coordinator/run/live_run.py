"""A run in memory: its row in the database, plus what exists only in the process (leases, deadlines).

`LiveRun.change` is the only way to change it. `coordinator/run/__init__.py` describes the states of a run, its lock,
and what is durable when.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.delegation import Delegation
from coordinator.aggregation.judging import SimilarityHistory
from coordinator.aggregation.measuring import Measure
from coordinator.aggregation.tasks import Blob, Lateness
from coordinator.run.members import Members
from coordinator.run.open_round import OpenRound
from coordinator.run.outer import OuterState
from coordinator.run.step_rates import StepRates
from coordinator.run.uploads import Uploads
from coordinator.run.waiters import EVENTS
from coordinator.store.blobs import Blobs, RunNames
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database, Fault
from coordinator.store.identity import Actor, audit_note
from coordinator.store.payloads import MemoryBudget
from coordinator.store.tables import EventRow, RunRow, WorkerRow
from protocol.digest import model_digest
from protocol.errors import Problem, SpecError
from protocol.fragments import Layout
from protocol.messages import DataSummary, FrozenSummary, RoundReport, RunState
from protocol.spec.run import checked_spec
from protocol.wire import ContributionHeader

logger = logging.getLogger(__name__)

READ_LOCK_S = 1.0  # how long a reader waits for the lock


# Kinds of events that are logged as warnings: lost or damaged files, models that differ, anything that stalls a run.
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
        "redone",
        "seeder-silent",
        "spoilt",
        "stalled",
        "storage-full",
        "storage-unavailable",
        "suspected",
    }
)


@dataclass(frozen=True)
class RunContext:
    """What a run needs from outside: storage, clocks, threads for heavy work, and a way to wake waiting requests."""

    database: Database
    data: DataDirectory
    blobs: Blobs
    submit: Callable[..., Future[None]]
    wake: Callable[[str, str | None], None]  # run, topic (None: all): wake the requests that wait for it
    storage_failed: Callable[[BaseException], Fault | None]  # record a failed write; return the disk's fault, if any
    storage_fault: Callable[[], Fault | None]  # what is wrong with disk or database now
    memory: MemoryBudget  # for payloads
    closing: threading.Event  # set when the coordinator stops: long work on other threads ends early
    notify: Callable[[str, str, str, dict[str, Any]], None]  # run, kind, message, data of an event; returns at once
    # Make a backup if they are beside the blobs, `alone`: in place of all others. Return the names of the blobs that
    # backups need. Call it after rows are deleted and before their blobs are.
    back_up: Callable[..., frozenset[str]]
    secret: bytes  # the keys of sketches are derived from it (aggregation/measuring.py)
    working: AbstractContextManager[object]  # held while a thread works on a fragment's bytes, one for each core
    delegation: Delegation | None = None  # leaves work on fragments to aggregators; None if there can be none
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


@dataclass
class Arrival:
    """A contribution that waits to be committed; its bytes are already durable in the blob `name`. Once it is
    `processed`, `error` is set if it was rejected; otherwise `created` is True if it is new, False if it had been
    accepted before."""

    header: ContributionHeader
    name: str
    digest: bytes
    size: int
    content: memoryview | None
    measured: Measure | None
    lateness: Lateness
    sha256: bytes | None = None  # if its worker has uploaded it to the store
    processed: bool = False
    created: bool = False
    error: BaseException | None = None


class RedoneDelta(NamedTuple):
    """A fragment's new delta and its residual, in the store. `units`: by left-out worker, those of its contribution."""

    delta: Blob
    residual: Blob | None
    units: dict[str, list[list[int]]]


@dataclass
class Redo:
    """Order to do the round before `state` again without some contributions (`upkeep/redoing.py`).

    found  by worker to leave out, what was measured of it: (evaluator, loss, loss without the worker)
    made   the new deltas, by fragment; None before they are made
    """

    state: int
    found: dict[str, list[tuple[str, float, float]]]
    made: list[RedoneDelta] | None = None
    making: bool = False


@dataclass
class QueuedReport:
    """A worker's report, and whether it is in the database yet."""

    worker: str
    report: RoundReport
    booked: bool = False


class Outcome(StrEnum):
    """What became of a contribution to a fragment."""

    COUNTED = "counted"  # with its whole weight
    SHORTENED = "shortened"
    LEFT_OUT = "left_out"
    LATE = "late"  # rejected because its fragment had closed


@dataclass
class Counters:
    """Counts since this process started. Only metrics read them.

    events    by kind
    outcomes  of contributions"""

    events: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def count_judged(self, factors: Iterable[float]) -> None:
        """Count the contributions to a published fragment. `factors`: the share of each one's weight that counted, 0 to
        1."""
        for factor in factors:
            counted = Outcome.COUNTED if factor >= 1 else Outcome.SHORTENED
            self.outcomes[Outcome.LEFT_OUT if factor == 0 else counted] += 1

    def count_late(self) -> None:
        self.outcomes[Outcome.LATE] += 1


class RunModel(BaseModel, frozen=True, from_attributes=True):
    """The model and data of a run, as fixed by the first worker. `data`: the training set; None if the run has none.
    `frozen`: the parameters that are not trained; None if there are none, or if the first worker did not report them.
    """

    layout: Layout
    data: DataSummary | None
    frozen: FrozenSummary | None = None


class LiveRun:
    """One run. Its methods are small; the logic is in the packages `rounds`, `workers`, `sync` and `upkeep`.

    Hold `lock`, which is reentrant, while you read several values that must be consistent, or act on what you read.
    `settle(run)` does whatever follows from the run's state and the time (`coordinator/sync/settling.py`).
    """

    def __init__(self, row: RunRow, context: RunContext, settle: "Callable[[LiveRun], None]") -> None:
        self.id = row.id
        self.name, self.created_at = row.name, row.created_at
        try:
            self.spec = checked_spec(row.spec)
        except SpecError as error:
            raise SpecError(f"the stored spec of the run {row.name} is not of this version: {error}") from error
        self.context = context
        self.blobs, self.names = context.blobs, RunNames(row.name)
        self.lock = threading.RLock()

        self._state = RunState(row.state)
        self._round, self._step = row.round, row.step
        self._model = None if row.layout is None else RunModel.model_validate(row)
        self._open: OpenRound | None = None
        self._change: Change | None = None  # the one in progress
        self._topics: list[str | None] = []  # to wake once the run has settled
        self._settle = settle
        self._settling = self._restored = self._removed = False

        self.members = Members(self.spec.members.lease_s)
        self.step_rates = StepRates()
        self.outer = OuterState(context.data.states(row.name), self.lock)
        self.reports: deque[QueuedReport] = deque()  # to be booked by the next thread that gets the lock
        self.arrivals: deque[Arrival] = deque()  # to be committed by the next thread that gets the lock
        self.uploads = Uploads(self.lock, context.blobs, context.clock)
        self.redo: Redo | None = None
        self.redone = 0  # how many rounds of the run were done again
        self.set_aside_bytes = 0  # of the files that were set aside
        self.not_direct: set[str] = set()  # workers that have uploaded an invalid payload to the store
        self.events_recorded = 0  # since the last trimming
        self.similarity = SimilarityHistory()
        self._unit_tokens: dict[str, int] = {}  # by worker, of its private data; never changes
        self.counters = Counters()

    def unit_tokens(self, worker: str | None) -> int:
        """Return the weight of one work unit of the worker's training set, in tokens. None: of the set that all workers
        share."""
        data = self.spec.data
        if data.format == "text":
            return self.spec.unit_tokens
        if not data.private:
            shared = None if self._model is None or self._model.data is None else self._model.data.unit_tokens
            return shared or self.spec.unit_tokens
        assert worker is not None, "private data belong to a worker"
        if worker not in self._unit_tokens:
            with self.context.database.read() as session:
                own = select(WorkerRow.unit_tokens).where(WorkerRow.run_id == self.id, WorkerRow.name == worker)
                self._unit_tokens[worker] = session.scalar(own) or self.spec.unit_tokens
        return self._unit_tokens[worker]

    @contextmanager
    def briefly_locked(self) -> Iterator[None]:
        """Hold the lock within the block, so that the values read are consistent. If the lock is not free within
        READ_LOCK_S, run the block without it: a write to a locked database may hold it for longer, and reports must
        still be shown."""
        held = self.lock.acquire(timeout=READ_LOCK_S)
        try:
            yield
        finally:
            if held:
                self.lock.release()

    # --- the one way to change it ---------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator["Change"]:
        """Change the run: the block writes rows and registers changes in memory; after the commit the run settles.

        Hold `lock` around both if the change depends on what you have read. An exception from the block or from the
        commit leaves database and memory as they were. An exception from the settling leaves the change in place, and
        the next tick, a fraction of a second later, settles again. Changes made while the run settles are part of the
        settling.
        """
        with self.lock:
            with self._transition() as change:
                yield change
            if not self._settling:
                self.settle()

    @contextmanager
    def _transition(self) -> Iterator["Change"]:
        if self._removed:
            raise Problem("not-found", f"the run {self.name} was removed")
        if self._change is not None:
            raise RuntimeError("a change within a change would be committed before what it depends on")
        try:
            with self.context.database.write() as session:
                self._change = change = Change(self, session)
                yield change
        finally:
            self._change = None
        self._topics += change.topics
        for apply in change.applied_later:
            apply()

    def settle(self) -> None:
        """Do whatever follows from the run's state and the time, then wake the requests that wait for what changed."""
        with self.lock:
            if not self._restored:
                return
            self._settling = True
            try:
                self._settle(self)
            finally:
                self._settling = False
                self._wake()

    def _wake(self) -> None:
        topics, self._topics = self._topics, []
        for topic in [None] if None in topics else dict.fromkeys(topics):
            self.context.wake(self.name, topic)

    def restored(self, opening: OpenRound | None = None) -> None:
        """Start to settle: memory now agrees with the database, and `opening` is the open round."""
        with self.lock:
            self._open, self._restored = opening, True
            self.settle()

    def suspend(self) -> None:
        """Stop settling until `restored` is called, because the run in memory is about to be rebuilt. The caller holds
        the lock until then."""
        self._restored = False

    def removed(self) -> None:
        """Refuse all further changes: the run's rows are deleted, but other threads may still have a reference to
        it."""
        with self.lock:
            self._removed, self._restored = True, False
            self.context.wake(self.name, None)

    # --- set by changes -------------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """The run's state, as set by the operator, the guard or the last round."""
        return self._state

    @property
    def round(self) -> int:
        """The number of the open or next round, which is also the number of the state that it starts from."""
        return self._round

    @property
    def step(self) -> int:
        """The schedule's inner steps before the open or next round (`schedule.py`)."""
        return self._step

    @property
    def model(self) -> RunModel | None:
        """The model and data, as fixed by the first worker; None until it has joined."""
        return self._model

    @property
    def open(self) -> OpenRound | None:
        """The open round; None between rounds."""
        return self._open

    # --- derived --------------------------------------------------------------------------

    @property
    def seeded(self) -> bool:
        """True once state 0 is complete."""
        return bool(self.outer.states)

    @property
    def shares_data(self) -> bool:
        """True if all workers train on one data set, and the coordinator assigns its units. False if each worker may
        have its own."""
        return self.model is not None and self.model.data is not None and self.model.data.digest is not None

    @property
    def ended(self) -> bool:
        """True if the run is finished or stopped."""
        return self.state in (RunState.FINISHED, RunState.STOPPED)

    @property
    def final_digest(self) -> bytes | None:
        """The finished run's model digest; None until the coordinator itself has taken the last outer step."""
        if self.state is not RunState.FINISHED or any(each.round != self.round for each in self.outer.states):
            return None
        return model_digest(each.digest for each in self.outer.states)


class Change:
    """One change of a run: rows written in `session`, and changes in memory that are applied after the commit. It
    exists only while the run's lock is held."""

    def __init__(self, run: LiveRun, session: Session) -> None:
        self.run, self.session = run, session
        self.applied_later: list[Callable[[], object]] = []
        self.topics: list[str | None] = []

    @property
    def row(self) -> RunRow:
        """The run's row."""
        return self.session.get_one(RunRow, self.run.id)

    def worker_row(self, worker: str) -> WorkerRow:
        """The row of a worker that has joined."""
        query = select(WorkerRow).where(WorkerRow.run_id == self.run.id, WorkerRow.name == worker)
        return self.session.scalars(query).one()

    def after_commit(self, apply: Callable[[], object]) -> None:
        """Call `apply`, which changes the run in memory, after the commit. Several functions are called in the order
        given."""
        self.applied_later.append(apply)

    def set_state(self, state: RunState) -> None:
        """Set the run's state."""
        self.row.state = state
        self.after_commit(partial(setattr, self.run, "_state", state))

    def set_model(self, model: RunModel) -> None:
        """Fix the model and data of the run."""
        dumped = model.model_dump()
        self.row.layout, self.row.data, self.row.frozen = dumped["layout"], dumped["data"], dumped["frozen"]
        self.after_commit(partial(setattr, self.run, "_model", model))

    def begin_round(self, opening: OpenRound) -> None:
        """Open the round. Its rows must have been added."""
        self.after_commit(partial(setattr, self.run, "_open", opening))
        self.after_commit(self.run.members.begin_round)

    def end_round(self, opening: OpenRound, steps: int) -> None:
        """End the open round, which advanced the schedule by `steps` inner steps. The run moves to the next state."""
        step = self.run.step + steps
        self.row.round, self.row.step = opening.number + 1, step
        self.after_commit(partial(setattr, self.run, "_open", None))
        self.after_commit(partial(self.run.members.end_round, opening.assigned, opening.contributed))
        seen = opening.step_times(self.run.unit_tokens)
        self.after_commit(partial(self.run.step_rates.observe, seen))
        self.after_commit(partial(setattr, self.run, "_round", opening.number + 1))
        self.after_commit(partial(setattr, self.run, "_step", step))

    def go_back(self, round_: int, step: int) -> None:
        """Make `round_` the next round, and drop the open one. `step`: the schedule's inner steps before `round_`."""
        self.row.round, self.row.step = round_, step
        self.after_commit(partial(setattr, self.run, "_open", None))
        self.after_commit(partial(setattr, self.run, "_round", round_))
        self.after_commit(partial(setattr, self.run, "_step", step))
        self.after_commit(self.run.outer.forget_history)

    def record(self, kind: str, message: str, **data: Any) -> None:
        """Record an event in the same transaction as the rows, and wake the event streams."""
        run = self.run
        about = {"run": run.name, "worker": data.get("worker"), "round": data.get("round")}
        level = logging.WARNING if kind in ALARMING else logging.INFO
        self.session.add(EventRow(run_id=run.id, at=run.context.now(), kind=kind, message=message, data=data))
        # Logged after the commit: on a full disk the same change is attempted many times.
        self.after_commit(partial(logger.log, level, "%s: %s", run.name, message, extra=about))
        self.after_commit(partial(_count_event, run, kind))
        self.after_commit(partial(run.context.notify, run.name, kind, message, data))
        self.wake(EVENTS)

    def audit(self, by: Actor, act: str, message: str) -> None:
        """Add an entry to the audit log in the same transaction."""
        audit_note(self.session, self.run.context.now(), by, act, message, self.run.name)

    def wake(self, topic: str | None = None) -> None:
        """Once the run has settled, wake the requests that wait for `topic` (None: all) and the event streams."""
        self.topics += [topic, EVENTS]


def _count_event(run: LiveRun, kind: str) -> None:
    run.events_recorded += 1
    run.counters.events[kind] += 1
