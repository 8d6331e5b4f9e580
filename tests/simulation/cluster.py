"""Several coordinators that share a database and a store, and their aggregators. The elections, the terms, the runs and
the tasks are the real ones. Forwarding is simulated, from what the real code knows of the leader.

Each machine has a wall clock of its own, which may be an hour off.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError
from starlette.types import Receive, Scope, Send

from coordinator.http.problems import problem_response
from coordinator.leadership.election import Election
from coordinator.leadership.forwarding import SILENT_S
from coordinator.leadership.standby import unready, vacant
from coordinator.leadership.terms import Terms
from coordinator.run.live_run import LiveRun
from coordinator.service import Coordinator, Term
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.blobs import StoreProbe
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Fence
from protocol.errors import Problem
from tests.simulation.aggregator_node import AggregatorNode
from tests.simulation.coordinator_node import (
    SECRET,
    TICK_S,
    add_worker_tokens,
    answer_of,
    application,
    template,
)
from tests.simulation.world.database import DatabaseNode
from tests.simulation.world.machine import Machine
from tests.simulation.world.primitives import Event, FakeLoop, drive
from tests.simulation.world.scheduler import Group, Scheduler
from tests.simulation.world.store import Answer, Headers, StoreBlobs, StoreNode

HOUR_S = 3600.0
APPLICATIONS = 8  # that take turns
NEARBY_S = 0.02  # a request between two coordinators takes no longer


class Cluster:
    """All of these machines. To the rest of the simulation they look like one coordinator: the one that leads."""

    def __init__(
        self, scheduler: Scheduler, rng: random.Random, seed: int, root: Path, store: StoreNode, aggregators: int
    ) -> None:
        self.scheduler, self.rng, self.store = scheduler, rng, store
        self.data_dir = root / "database"
        self.data_dir.mkdir()
        shutil.copy(template(root.parent), self.data_dir / sqlite.FILE)
        served_dir = root.parent / f"database-{os.getpid()}"  # always at the same path
        served_dir.unlink(missing_ok=True)
        served_dir.symlink_to(self.data_dir)
        self.url = str(sqlite.url_in(served_dir))
        random_of = lambda name: random.Random(f"{seed} {name}")  # noqa: E731
        self.database = DatabaseNode(scheduler, random_of("database"), served_dir, self.machine_of)
        self.database.serve()
        self.coordinators = [
            SharedCoordinator(self, random_of(name), root, name)
            for name in (f"coordinator{number}" for number in range(rng.randint(2, 3)))
        ]
        connect = self.database.statements().connect
        self.aggregators = [
            AggregatorNode(scheduler, random_of(name), root, name, store, connect)
            for name in (f"aggregator{number}" for number in range(aggregators))
        ]
        self.machines: list[Machine] = [*self.coordinators, *self.aggregators]
        self.loses_one = rng.random() < 0.3
        self.gone: Machine | None = None
        self.dirty = True
        self.worker_tokens: dict[str, str] = {}
        self.on_crash: Callable[[], None] = lambda: None
        self.on_start: Callable[[Coordinator, bool], None] = lambda service, directly: None
        self.on_commit: Callable[[], None] = lambda: None
        self.in_start = False  # while one begins, another one's deltas may still be on their way
        self.terms = 0
        self.outcomes: Counter[str] = Counter()
        self.seen_term: int | None = None  # that of the leader whose crash was seen

    # --- as one coordinator ---------------------------------------------------------------------------------------

    @property
    def leader(self) -> "SharedCoordinator | None":
        """Who leads for sure."""
        return next((each for each in self.coordinators if each.leads), None)

    @property
    def up(self) -> bool:
        return self.leader is not None

    @property
    def service(self) -> Coordinator | None:
        return None if self.leader is None else self.leader.service

    @property
    def run(self) -> LiveRun:
        assert self.service is not None
        return self.service.run("sim")

    @property
    def group(self) -> Group:
        return (self.leader or self.coordinators[0]).group

    @property
    def crashes(self) -> dict[str, int]:
        return dict(sum((Counter(each.crashes) for each in self.machines), Counter[str]()))

    @property
    def tasks_done(self) -> dict[str, int]:
        """What has become of the tasks of all terms."""
        return {f"tasks {outcome}": count for outcome, count in self.outcomes.items()}

    def start(self) -> None:
        for machine in self.machines:
            machine.start()

    def any_machine(self) -> Machine:
        """Rather the leader's."""
        if self.leader is not None and self.rng.random() < 0.5:
            return self.leader
        return self.rng.choice(self.machines)

    def is_gone(self, machine: Machine) -> bool:
        """One coordinator may be lost for good, in some seeds the first that is down."""
        if self.gone is None and self.loses_one and machine in self.coordinators:
            self.gone = machine
        return machine is self.gone

    def door(self) -> "SharedCoordinator":
        """Whom the load balancer sends a request to."""
        return self.rng.choice(self.coordinators)

    def machine_of(self, group: Group) -> Machine | None:
        return next((each for each in self.machines if each.group is group), None)

    def ordered(self, act: Callable[[], object]) -> Callable[[], object]:
        """What an operator lets a task of the leader's process do, if that still leads; and it may fail."""

        def order() -> None:
            if self.leader is None or self.leader.group is not self.scheduler.current.group:
                return
            try:
                act()
            except DBAPIError:
                pass
            except Problem as problem:
                if problem.slug != "superseded":
                    raise

        return order

    def read(self, name: str) -> bytes | None:
        return self.store.read(name)

    def names(self, prefix: str) -> list[str]:
        return self.store.names(prefix)

    def began(self, service: Coordinator, token: int) -> None:
        """A term has begun. What was seen as the leader crashed is comparable to its runs if it is the next one."""
        self.terms += 1
        add_worker_tokens(service, self.worker_tokens)
        assert service.delegation is not None
        service.delegation.outcomes = self.outcomes
        self.on_start(service, self.seen_term is not None and token == self.seen_term + 1)
        self.seen_term = None


class SharedCoordinator(Machine):
    """One of the coordinators."""

    def __init__(self, cluster: Cluster, rng: random.Random, root: Path, name: str) -> None:
        super().__init__(cluster.scheduler, rng, root, name)
        self.cluster = cluster
        self.skew_s = rng.choice([0.0, HOUR_S, -HOUR_S])
        self.address = f"http://{name}"
        self.terms: Terms | None = None
        self._data: DataDirectory | None = None

    @property
    def up(self) -> bool:
        return self.terms is not None

    @property
    def leads(self) -> bool:
        return self.terms is not None and self.terms.app is not None

    @property
    def service(self) -> Coordinator:
        assert self.terms is not None
        assert self.terms.coordinator is not None
        return self.terms.coordinator

    # --- its life -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        clock = lambda: self.scheduler.now  # noqa: E731
        self._data = DataDirectory(self.data_dir)
        probe = StoreProbe(StoreBlobs(self, self.cluster.store).ask, clock)
        election = Election(self.cluster.url, self.address, probe, clock)  # type: ignore[arg-type]
        self.terms = Terms(election, self._build, partial(TermApplication, self), self._data.close)  # type: ignore[arg-type]
        drive(self._live(self.terms))
        self.end()

    async def _live(self, terms: Terms) -> None:
        async with terms.running():
            self.stopping.wait()
            terms.stop_waiting()

    def _build(self, fence: Fence) -> Coordinator:
        assert self.terms is not None
        assert self._data is not None
        return Coordinator(
            Settings(data_dir=self.data_dir, database=self.cluster.url),
            clock=lambda: self.scheduler.now,
            now=self.terms.election.now,
            store=lambda _: StoreBlobs(self, self.cluster.store, fence.holds),
            secret=SECRET,
            term=Term(fence, self._data, self.terms.election.peers),
        )

    def crashing(self) -> None:
        if self.leads:
            self.cluster.on_crash()
            assert self.terms is not None
            assert self.terms.election.fence is not None
            self.cluster.seen_term = self.terms.election.fence.token
        self.terms = None

    # --- its network side -----------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        """What it answers, or the leader that it forwards the request to."""
        assert self.terms is not None
        if self.terms.app is not None:
            return answer_of(self.terms.app, method, target, headers, body)
        leader, replaced = self.terms.leader, self.terms.replaced
        if leader is None or self.terms.unreachable:
            return _refused(vacant(self.terms.fault))
        other = next(each for each in self.cluster.coordinators if each.address == leader.address)
        self.scheduler.sleep(self.rng.uniform(0, NEARBY_S))
        if not other.up:
            return _refused(unready("the leader does not answer"))
        return self._forwarded(other, replaced, partial(other.of_another, method, target, headers, body))

    def of_another(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        """What it answers to a request that another one forwards."""
        app = None if self.terms is None else self.terms.app
        return _refused(vacant()) if app is None else answer_of(app, method, target, headers, body)

    def _forwarded(self, other: "SharedCoordinator", replaced: Any, act: Callable[[], Answer]) -> Answer:
        """What a task of the other one's process answers; or that it does not."""
        ended, found, group = Event(self.scheduler), list[Answer](), other.group

        def serve() -> None:
            found.append(act())
            ended.set()

        self.scheduler.spawn(serve, "a forwarded request", group)
        until = self.scheduler.now + SILENT_S
        while not ended.wait(0.5):
            if group.dead or replaced.is_set() or self.scheduler.now > until:
                return _refused(unready("another coordinator leads now, or this one stops"))
        return found[0]


class TermApplication:
    """The real application of one term; and its lifespan, without an event loop."""

    def __init__(self, node: SharedCoordinator, service: Coordinator) -> None:
        self._node, self._service = node, service
        self._app = application(1 + node.cluster.terms % APPLICATIONS)
        self._app.state.coordinator = service
        self.router = self.state = self
        self.coordinator = service

    @asynccontextmanager
    async def lifespan_context(self, _: "TermApplication") -> AsyncIterator[None]:
        scheduler, over, ended = self._node.scheduler, Event(self._node.scheduler), Event(self._node.scheduler)
        self._service.waiters.attach(FakeLoop(scheduler))  # type: ignore[arg-type]

        def tick() -> None:
            while not over.wait(TICK_S):
                self._service.tick()
            ended.set()

        scheduler.spawn(tick, "tick")
        assert self._node.terms is not None
        assert self._node.terms.election.fence is not None
        self._node.cluster.began(self._service, self._node.terms.election.fence.token)
        yield
        over.set()
        ended.wait()
        self._service.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _refused(problem: Problem) -> Answer:
    response = problem_response(problem)
    return response.status_code, response.raw_headers, bytes(response.body)
