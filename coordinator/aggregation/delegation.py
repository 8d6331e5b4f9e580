"""The leader's side of the queue: it leaves tasks to aggregators, and waits for the results.

Whatever aggregators do not do, the leader does itself: if there are none, if one reports a failure, or if several have
begun a task and none has finished it. So all recovery from damaged files is in one place, the leader's own way.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from coordinator.aggregation import queue
from coordinator.aggregation.queue import Answer, KnownAggregator
from coordinator.aggregation.tasks import Advance, Advanced, Aggregated, Task
from coordinator.store import postgresql
from coordinator.store.database import Database, superseded
from protocol import __version__

POLL_S, IDLE_S = 0.25, 1.0  # between looks at the queue, with and without tasks in it
FRESH_S = 6.0  # an aggregator that was seen within this time is there; it reports every 2 s
SILENT_S = 15.0  # one that was not seen for longer is reported
MOST_ATTEMPTS = 3

logger = logging.getLogger(__name__)


@dataclass
class _Asked:
    task: Task
    future: "Future[Aggregated | Advanced | None]"


class Delegation:
    """Leaves tasks to aggregators. Thread-safe.

    aggregators  those that were seen lately
    waiting      the number of tasks that nobody works on
    outcomes     counts of tasks since this process began to lead: done, failed, withdrawn; and of those that were done,
                 refused
    """

    def __init__(self, database: Database) -> None:
        self.aggregators: list[KnownAggregator] = []
        self.waiting = 0
        self.outcomes: Counter[str] = Counter()
        self._database = database
        self._lock = threading.Lock()
        self._new: list[_Asked] = []
        self._asked: dict[int, _Asked] = {}  # by the task's number
        self._over: list[int] = []  # numbers of tasks whose rows can be removed
        self._clear = True  # whether the queue may have tasks that nobody waits for
        self._stepped_by: dict[tuple[str, int], str] = {}  # by run and fragment: the aggregator that has the state
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="delegation")

    def start(self) -> None:
        """Remove the tasks of an earlier leader, and begin. Call it before blobs that no row names are deleted. May
        raise SQLAlchemyError."""
        self.step()
        self._thread.start()

    def close(self) -> None:
        """End. Tasks that are not done are the next leader's."""
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._fail(superseded())

    def wake(self) -> None:
        """Look at the queue now."""
        self._wake.set()

    @property
    def is_possible(self) -> bool:
        """True if an aggregator is there."""
        return bool(self.available)

    @property
    def available(self) -> list[KnownAggregator]:
        """The aggregators of this version that were just seen."""
        return [each for each in self.aggregators if each.version == __version__ and each.silent_s < FRESH_S]

    def troubles(self) -> Iterator[str]:
        """Yield what is wrong with aggregators."""
        for each in self.aggregators:
            if each.version != __version__:
                yield f"the aggregator {each.host} has version {each.version}, so it gets no work"
            elif each.silent_s > SILENT_S:
                yield f"the aggregator {each.host} has not been heard of for {each.silent_s:.0f} s"

    def ask(self, task: Task) -> Aggregated | Advanced | None:
        """Let an aggregator do the task, and wait for the result. Return None if the leader must do it itself. Raises
        Problem and SQLAlchemyError like a write transaction."""
        asked = _Asked(task, Future())
        with self._lock:
            if self._closing.is_set():
                raise superseded()
            if not self.is_possible:
                return None
            self._new.append(asked)
        self._wake.set()
        return asked.future.result()

    def refuse(self, task: Task, why: str) -> None:
        """Record that a result is wrong, so that the leader does the task itself."""
        self.outcomes["refused"] += 1
        logger.warning("an aggregator's result is refused (%s of the run %s): %s", task.kind, task.run, why)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(POLL_S if self._asked or self._new else IDLE_S)
            self._wake.clear()
            try:
                self.step()
            except Exception as error:  # noqa: BLE001 - reported by the callers of `ask`
                logger.debug("the queue cannot be used: %s", error)
                self._fail(error)

    def step(self) -> None:
        """Add new tasks to the queue, and hand out results. Raises Problem and SQLAlchemyError."""
        self._write()
        with self._database.read() as session:
            connection = session.connection()
            self.aggregators = queue.aggregators(connection)
            answers = queue.answers(connection, self._asked) if self._asked else []
        self.waiting = sum(each.idle and each.result is None and each.failure is None for each in answers)
        abandoned = set(self._asked) - {each.id for each in answers}  # their rows are gone: another one leads
        for answer in answers:
            if answer.result is not None:
                self._done(answer, answer.result)
            elif answer.failure is not None:
                task = self._asked[answer.id].task
                logger.warning(
                    "the aggregator %s could not do its task (%s of the run %s): %s",
                    answer.holder,
                    task.kind,
                    task.run,
                    answer.failure,
                )
                self._answer(answer.id, None, "failed")
            elif answer.idle and answer.attempts >= MOST_ATTEMPTS:
                logger.warning("%d aggregators have begun a task and not finished it", answer.attempts)
                abandoned.add(answer.id)
        if not self.is_possible:
            abandoned.update(self._asked)
        self._withdraw(abandoned)

    def _write(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        over, self._over = self._over, []
        if not new and not over and not self._clear:
            return
        try:
            with self._database.write() as session:
                connection = session.connection()
                if self._clear:
                    queue.clear(connection)
                queue.remove(connection, over)
                ids = queue.add(connection, [(each.task, self._preferred(each.task)) for each in new]) if new else []
                if new and connection.dialect.name == "postgresql":
                    postgresql.ring(connection, queue.TASKS)
        except BaseException:
            with self._lock:
                self._new = new + self._new
            raise
        self._clear = False
        self._asked.update(zip(ids, new, strict=True))

    def _preferred(self, task: Task) -> str | None:
        """Return the aggregator that has the state that the task needs, if it is there."""
        if not isinstance(task, Advance):
            return None
        found = self._stepped_by.get((task.run, task.fragment))
        return found if any(each.id == found for each in self.available) else None

    def _done(self, answer: Answer, result: Aggregated | Advanced) -> None:
        task = self._asked[answer.id].task
        if isinstance(task, Advance) and answer.holder is not None:
            self._stepped_by[task.run, task.fragment] = answer.holder
        self._answer(answer.id, result, "done")

    def _answer(self, id_: int, result: Aggregated | Advanced | None, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._over.append(id_)
        self._asked.pop(id_).future.set_result(result)

    def _withdraw(self, ids: set[int]) -> None:
        """Take these tasks back from the queue, for the leader to do, unless they have just been done."""
        if not ids:
            return
        with self._database.write() as session:
            done = queue.withdraw(session.connection(), ids)
        for id_ in ids - done:
            self.outcomes["withdrawn"] += 1
            self._asked.pop(id_).future.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Let everybody who waits fail with `error`. They ask again later."""
        with self._lock:
            asked, self._asked, self._new = [*self._asked.values(), *self._new], {}, []
            self._over, self._clear = [], True
        for each in asked:
            each.future.set_exception(error)
