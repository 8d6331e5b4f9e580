"""What goes wrong: the faults that a seed chooses from, one by one, until the calm end of its run."""

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from coordinator.rounds import assigning, leases, membership, steering
from coordinator.store.identity import Actor, Identity
from protocol.errors import Problem
from protocol.messages import JoinRequest, Metrics, RunState, Scope, WorkerChange
from tests.simulation.cluster import Cluster
from tests.simulation.coordinator_node import MOST_WORKERS
from tests.simulation.network import Weather
from tests.simulation.violation import Violation, demand
from tests.simulation.worker_node import SHARED_DATA, Toy, WorkerNode
from tests.simulation.world.database import DatabaseNode
from worker.state.parameters import tensor_specs

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

FAULTS_S = 240.0  # of virtual time, at most


class Faults:
    """Every method that returns a bool is a fault; whether it happened."""

    def __init__(self, simulation: "Simulation", rng: random.Random) -> None:
        self._sim, self._rng = simulation, rng
        self.counts: dict[str, int] = {}

    def run(self, calm_rounds: int) -> None:
        """Until so many rounds are left, or it takes too long."""
        rng, sleep = self._rng, self._sim.scheduler.sleep
        start = self._sim.scheduler.now
        every_s = rng.choice([3.0, 8.0, 20.0])
        crash_chance = rng.choice([0.0, 0.002, 0.01])
        for machine in self._sim.node.machines:
            machine.crash_chance = crash_chance
        if isinstance(self._sim.node, Cluster):
            for aggregator in self._sim.node.aggregators:
                aggregator.crash_chance = rng.choice([0.0, 0.02, 0.06])
        for worker in self._sim.workers.values():
            worker.crash_chance = rng.choice([0.0, 0.01, 0.03])
        kinds = [
            self._weather,
            self._kill_coordinator,
            self._kill_worker,
            self._stop_worker,
            self._partition,
            self._suspend,
            self._hang,
            self._freeze_coordinator,
            self._pause,
            self._evict,
            self._fill_disk,
            self._slow_disk,
            self._impostor,
            self._new_worker,
        ]
        if self._sim.store is not None:
            kinds += [self._store_down, self._store_slow]
            self._sim.store.late, self._sim.store.truncates = rng.random() < 0.5, rng.random() < 0.3
        if self._database is not None:
            kinds += [
                self._database_down,
                self._database_slow,
                self._lose_replies,
                self._cut_off_from_the_database,
                self._cut_off_from_the_store,
                self._stop_machine,
            ]
        chosen = rng.sample(kinds, rng.randint(2, len(kinds)))
        while self._sim.ledger.round < self._sim.rounds - calm_rounds and self._sim.scheduler.now - start < FAULTS_S:
            sleep(rng.expovariate(1 / every_s))
            fault = rng.choice(chosen)
            if fault():
                name = fault.__name__.strip("_")
                self.counts[name] = self.counts.get(name, 0) + 1
                self._sim.disturbed_at = self._sim.scheduler.now

    def end(self) -> None:
        """No more faults: from here on the run must come to its end."""
        for machine in self._sim.node.machines:
            machine.calm()
        if self._database is not None:
            self._database.down_until = self._database.slow_until = self._database.loses = 0.0
        if self._sim.store is not None:
            self._sim.store.down_until = self._sim.store.slow_until = 0.0
            self._sim.store.late = self._sim.store.truncates = False
        self._sim.weather = Weather()
        for worker in self._sim.workers.values():
            worker.crash_chance, worker.line.cut_until, worker.hung_until = 0.0, 0.0, 0.0
        self._resume()
        if self._rng.random() < 0.5:  # the others go on without it
            self._hang()
        self._sim.disturbed_at = self._sim.scheduler.now

    def _worker(self) -> WorkerNode:
        return self._rng.choice(sorted(self._sim.workers.values(), key=lambda worker: worker.name))

    def _weather(self) -> bool:
        bad = lambda most: self._rng.choice([0.0, 0.0, most / 4, most])  # noqa: E731
        self._sim.weather = Weather(
            lost=bad(0.1),
            answer_lost=bad(0.1),
            cut=bad(0.2),
            damaged=bad(0.1),
            twice=bad(0.2),
            proxy=bad(0.1),
            delay_s=self._rng.choice([0.02, 0.1, 1.0]),
        )
        return True

    @property
    def _database(self) -> DatabaseNode | None:
        return self._sim.node.database

    def _kill_coordinator(self) -> bool:
        if not self._sim.node.up:
            return False
        machine, power = self._sim.node.any_machine(), self._rng.random() < 0.5
        if self._rng.random() < 0.6:
            machine.crash_next = power
        elif machine.group.dead:
            return False
        else:
            machine.crash(power=power)
        return True

    def _kill_worker(self) -> bool:
        worker = self._worker()
        if not worker.running:
            return False
        worker.crash(power=self._rng.random() < 0.5)
        if self._rng.random() < 0.15:
            worker.lose_disk()
        return True

    def _stop_worker(self) -> bool:
        self._worker().stop()
        return True

    def stop_everybody(self) -> None:
        """SIGTERM to all workers at once, as soon as none of them ends its round by the step that it is at."""
        workers = self._sim.workers.values()
        while not self._sim.calm and not all(worker.steps_left() > 1 for worker in workers):
            self._sim.scheduler.sleep(0.1)
        if self._sim.calm:
            return
        self.counts["stop_everybody"] = 1
        self._sim.disturbed_at = self._sim.scheduler.now
        for worker in self._sim.workers.values():
            worker.stop()

    def _partition(self) -> bool:
        self._worker().line.cut_until = self._sim.scheduler.now + self._rng.choice([1.0, 8.0, 40.0])
        return True

    def _suspend(self) -> bool:
        self._worker().group.frozen_until = self._sim.scheduler.now + self._rng.choice([2.0, 15.0, 40.0])
        return True

    def _hang(self) -> bool:
        worker = self._worker()
        worker.hung_until = self._sim.scheduler.now + self._rng.choice([20.0, 90.0, 200.0])
        return worker.running

    def _freeze_coordinator(self) -> bool:
        machine, seconds = self._sim.node.any_machine(), self._rng.choice([2.0, 15.0])
        if self._database is not None and self._rng.random() < 0.7:
            machine.freeze_s = seconds  # as it begins to write
        else:
            machine.group.frozen_until = self._sim.scheduler.now + seconds
        return True

    def _operate(self, act: Callable[[], object]) -> bool:
        """Do something as the operator, in the coordinator's process; back when it is done, or that process is dead."""
        if not self._sim.node.up:
            return False
        task = self._sim.scheduler.spawn(self._sim.node.ordered(act), "the operator", self._sim.node.group)
        while not task.done:
            self._sim.scheduler.sleep(0.1)
        return True

    def _pause(self) -> bool:
        def pause() -> None:
            if not self._sim.node.run.ended:
                steering.change_state(
                    self._sim.node.run, self._rng.choice([RunState.PAUSED, RunState.DRAINING]), Actor()
                )

        if not self._operate(pause):
            return False
        self._sim.scheduler.sleep(self._rng.uniform(0, 15))
        self._resume()
        return True

    def _resume(self) -> None:
        """Again and again until it is done: the coordinator may be down, or die before it is."""

        def resume() -> None:
            if not self._sim.node.run.ended:
                steering.change_state(self._sim.node.run, RunState.RUNNING, Actor())

        while not self._sim.node.up or self._sim.node.run.state in (RunState.PAUSED, RunState.DRAINING):
            self._operate(resume)
            self._sim.scheduler.sleep(1.0)

    def _evict(self) -> bool:
        name = self._worker().name

        def evict() -> None:
            try:
                membership.change_worker(self._sim.node.run, name, WorkerChange(state="evicted"), Actor())
            except Problem as problem:
                if problem.slug != "not-found":
                    raise

        return self._operate(evict)

    def _fill_disk(self) -> bool:
        self._sim.node.any_machine().full_until = self._sim.scheduler.now + self._rng.uniform(1, 15)
        return True

    def _slow_disk(self) -> bool:
        self._sim.node.any_machine().slow_until = self._sim.scheduler.now + self._rng.uniform(1, 30)
        return True

    def _store_down(self) -> bool:
        assert self._sim.store is not None
        self._sim.store.down_until = self._sim.scheduler.now + self._rng.choice([1.0, 8.0, 40.0])
        return True

    def _store_slow(self) -> bool:
        assert self._sim.store is not None
        self._sim.store.slow_until = self._sim.scheduler.now + self._rng.uniform(1, 30)
        return True

    def _database_down(self) -> bool:
        assert self._database is not None
        self._database.down_until = self._sim.scheduler.now + self._rng.choice([0.5, 8.0, 40.0])
        return True

    def _database_slow(self) -> bool:
        assert self._database is not None
        self._database.slow_until = self._sim.scheduler.now + self._rng.uniform(1, 30)
        return True

    def _lose_replies(self) -> bool:
        """Commits of everybody, from now on."""
        assert self._database is not None
        self._database.loses = self._rng.choice([0.0, 0.02, 0.1])
        return True

    def _cut_off_from_the_database(self) -> bool:
        return self._cut_off("database")

    def _cut_off_from_the_store(self) -> bool:
        return self._cut_off("store")

    def _cut_off(self, other: str) -> bool:
        machine = self._sim.node.any_machine()
        machine.cut_until[other] = self._sim.scheduler.now + self._rng.choice([1.0, 8.0, 40.0])
        return True

    def _stop_machine(self) -> bool:
        """SIGTERM to a coordinator or an aggregator."""
        machine = self._sim.node.any_machine()
        if machine.group.dead:
            return False
        machine.stop()
        return True

    def _impostor(self) -> bool:
        """A second process under a living worker's name is refused."""
        name = self._worker().name

        def join() -> None:
            run = self._sim.node.run
            with run.lock:
                if run.ended or name not in run.members or run.model is None:
                    return
                request = self._join_request()
                holder = Identity(Scope.WORKER, token=run.members.token(name))  # it has got hold of that
                try:
                    membership.join(run, name, request, holder, Actor(), lambda token: True)
                except Problem as problem:
                    if problem.slug == "superseded":
                        raise
                    demand(problem.slug == "worker-name-taken", "I7", f"the impostor was told {problem}")
                else:
                    raise Violation(f"I7: a second {name} was let in while the first was alive")

        return self._operate(join)

    def _join_request(self) -> JoinRequest:
        data = None if self._sim.private else SHARED_DATA
        return JoinRequest(tensors=tensor_specs(Toy(self._sim.fragments)), data=data)

    def be_idle(self, name: str) -> None:
        """A name that joins, beats and takes assignments, and never contributes; until the calm end."""
        self.counts["idle_name"] = self.counts.get("idle_name", 0) + 1

        def beat() -> None:
            run = self._sim.node.run
            with run.lock:
                if run.ended or run.model is None:
                    return
                if name not in run.members:
                    if run.state is RunState.DRAINING:  # which takes no newcomers
                        return
                    request = self._join_request()
                    membership.join(run, name, request, Identity(Scope.WORKER), Actor(), lambda token: True)
                leases.renew(run, name, Metrics())
                if run.seeded:
                    assigning.assign(run, name, run.round, [])

        while not self._sim.calm:
            self._operate(beat)
            self._sim.scheduler.sleep(2.0)

    def _new_worker(self) -> bool:
        if len(self._sim.workers) >= MOST_WORKERS:
            return False
        name = f"w{len(self._sim.workers)}"
        self._sim.add_worker(name)
        self._sim.scheduler.spawn(partial(self._sim.supervise, self._sim.workers[name]), f"supervisor of {name}")
        return True
