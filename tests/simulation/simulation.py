"""One seed: a run of a few workers through faults that the seed chooses, then a calm end in which it must finish."""

import atexit
import logging
import random
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from blake3 import blake3

from coordinator.rounds.opening import status
from coordinator.service import Coordinator
from coordinator.store.database import Database
from coordinator.store.identity import Actor
from protocol.errors import Problem
from protocol.messages import DataSummary, Scope, TokenRequest
from protocol.spec.run import parse_spec
from tests.simulation.cluster import Cluster
from tests.simulation.coordinator_node import CoordinatorNode, crash_at_commits
from tests.simulation.faults import Faults
from tests.simulation.hostile import Hostile
from tests.simulation.ledger import HOSTILE, Ledger
from tests.simulation.network import Line, Weather
from tests.simulation.violation import Violation, demand
from tests.simulation.worker_node import SHARED_DATA, HeldOut, WorkerNode
from tests.simulation.world.machine import Machine
from tests.simulation.world.patched import simulated
from tests.simulation.world.scheduler import Group, Scheduler
from tests.simulation.world.store import StoreNode
from worker.line import line

CALM_ROUNDS = 4
PATIENCE_S = 400.0  # without a fault and without a round closing
LEASE_S = 10.0
GRACE_MAX_S = 20.0
SETTLE_S, SLACK_S = 20.0, 5.0  # until the faults that have begun are over, and for the coordinator's ticks
LOOK_S = 0.5  # between two looks at what may not last, which is much longer
MAX_STEPS = 200_000
PART_BYTES = (100, 300, 1 << 16, 1 << 16)  # payloads have some hundreds
MEMORY = Path("/dev/shm")

SPEC = """
name = "sim"
[model]
factory = "tests.simulation.worker_node:Toy"
[data]
source = "custom"
{data}
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
upload_codec = "{upload}"
download_codec = "{download}"
zstd = {zstd}
fragment_elements = 512
{schedule}
[members]
min_workers = {min_workers}
lease_s = {lease_s}
grace_factor = 0.5
grace_min_s = {grace_min_s}
grace_max_s = {grace_max_s}
[checkpoints]
every_rounds = {every_rounds}
keep = {keep}
[guard]
loss_rise = 1e6
"""


def _is_hostile(seed: int) -> bool:
    """A fifth of the seeds have a hostile worker beside the honest ones."""
    return random.Random(f"{seed} hostile 4").randrange(5) == 0


def _has_a_store(seed: int) -> bool:
    """A quarter of the seeds keep blobs in an object store, which workers reach themselves."""
    return random.Random(f"{seed} store").randrange(4) == 0


def _is_shared(seed: int) -> bool:
    """A quarter of the seeds have several coordinators, with one database and one store, and perhaps aggregators."""
    return random.Random(f"{seed} shared 27").randrange(4) == 0


def _data(rng: random.Random) -> str:
    """In a quarter of the seeds every worker brings a training set of its own."""
    return "" if rng.randrange(4) else "private = true"


def _download(rng: random.Random, exact: str, upload: str) -> str:
    """In a quarter of the seeds the coordinator has error feedback. Its means are not 0 where nobody has trained, and
    late work lacks a share of them: what ternary uploads leave out could not be told from that."""
    return "2bit" if upload != "ternary" and not rng.randrange(4) else exact


def _schedule(rng: random.Random, inner_steps: int) -> str:
    """Half of the seeds whose workers wait are classic DiLoCo."""
    overlap = rng.randrange(inner_steps)
    return 'wait = "always"\n' + rng.choice(
        [
            "",
            "",
            "",
            'overlap = "eager"',
            f"overlap = {overlap}",
            f'offsets = "spread"\noverlap = {overlap}',
        ]
    )


def _never_waits(seed: int, inner_steps: int) -> str | None:
    """In two thirds of the seeds the workers never wait, but train on, each at its speed, as is the default."""
    rng = random.Random(f"{seed} wait 414")
    if not rng.randrange(3):
        return None
    return rng.choice(["", "", f"most_steps = {inner_steps + rng.randint(1, 2 * inner_steps)}"])


@dataclass
class Report:
    """What one seed went through."""

    seed: int
    failure: str | None = None
    rounds: int = 0
    steps: int = 0
    checks: int = 0
    virtual_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    trace: str = ""


class Simulation:
    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        rng = self.rng = random.Random(f"{seed} plan")
        self.scheduler = Scheduler(random.Random(f"{seed} order"))
        self.rounds = rng.randint(6, 9)
        self.fragments = rng.randint(1, 3)
        self.hostile = _is_hostile(seed)
        self.min_workers = max(rng.randint(1, 2), 1 + self.hostile)  # so in every delta there is an honest contribution
        count = rng.randint(max(2, self.min_workers), 4)
        inner_steps = rng.randint(1, 3)
        never_waits = _never_waits(seed, inner_steps)
        if never_waits is not None:  # a unit is an element, and they need many
            self.rounds = min(self.rounds, 6)
        data = _data(random.Random(f"{seed} data"))
        upload = rng.choice(["fp32", "ternary", "int8"])
        if data and upload == "ternary":
            # Units of several workers are the same elements then, so a mean has of late work what another worker sent:
            # what the codec left out cannot be told from it.
            upload = "int8"
        self.spec = SPEC.format(
            rounds=self.rounds,
            data=data,
            inner_steps=inner_steps,
            schedule=_schedule(random.Random(f"{seed} schedule"), inner_steps) if never_waits is None else never_waits,
            upload=upload,
            download=_download(random.Random(f"{seed} download"), rng.choice(["fp32", "int4", "int8"]), upload),
            zstd=rng.choice(["true", "false"]),
            min_workers=self.min_workers,
            lease_s=LEASE_S,
            grace_min_s=rng.choice([0.5, 3.0]),
            grace_max_s=GRACE_MAX_S,
            every_rounds=rng.randint(1, 3),
            keep=rng.randint(1, 2),
        )
        self.shared = _is_shared(seed)
        has_a_store = self.shared or _has_a_store(seed)
        self.store = StoreNode(self.scheduler, random.Random(f"{seed} the store")) if has_a_store else None
        self.node = self._coordinators()
        self.weather = Weather()
        self.workers: dict[str, WorkerNode] = {}
        spec = parse_spec(self.spec)
        self.private = spec.data.private
        self.ledger = Ledger(
            *(self.node, self.workers, spec.outer, spec.sync, spec.unit_tokens, HeldOut(self.fragments)),
            private=self.private,
            hostile=self.hostile,
        )
        self.node.on_crash, self.node.on_start = self.ledger.crashing, self._started
        self.node.on_commit = self.ledger.committed
        for number in range(count):
            self.add_worker(f"w{number}")
        self.fate = Group("fate")
        self.faults = Faults(self, rng)
        self.hostile_token = ""
        self.hostiles = [Hostile(self, HOSTILE, lambda: self.hostile_token)] if self.hostile else []
        self.calm = False
        self.calm_at: float | None = None
        self.disturbed_at = self.scheduler.now
        self.progressed_at = self.scheduler.now
        self.look_at = self.scheduler.now
        self.held_since: dict[tuple[int, int], float] = {}  # by round and fragment: when only hung workers were missing
        self.overdue_since: dict[str, float] = {}  # by worker: when its lease had run out
        self.last_round = 0
        self.trace = blake3()

    def _coordinators(self) -> CoordinatorNode | Cluster:
        rng = random.Random(f"{self.seed} coordinator")
        if not self.shared or self.store is None:
            return CoordinatorNode(self.scheduler, rng, self.root, self.store)
        return Cluster(self.scheduler, rng, self.seed, self.root, self.store, aggregators=rng.randint(0, 2))

    def add_worker(self, name: str) -> None:
        rng = random.Random(f"{self.seed} {name}")
        line = Line(
            self.scheduler, random.Random(f"{self.seed} {name}'s line"), self.node, lambda: self.weather, self.ledger
        )
        self.workers[name] = WorkerNode(
            name,
            self.scheduler,
            rng,
            self.root,
            line,
            lambda: self.node.worker_tokens[name],
            self._over,
            self.fragments,
            speed_s=max(rng.choice([0.3, 1.0, 1.0, 4.0]), float(self.hostile)),
            keeps_state=rng.random() < 0.85,
            data=DataSummary(digest="0d" * 32, units=3 + len(self.workers)) if self.private else SHARED_DATA,
        )

    def _over(self) -> bool:
        return self.ledger.finished

    # --- one run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        torch.set_num_threads(1)
        self.node.start()
        self.scheduler.spawn(self._begin, "begin", self.fate)
        real = Database.write
        with (
            simulated(self.scheduler, random.Random(f"{self.seed} secrets"), self._fsync, self.node.database),
            crash_at_commits(self.node, real),
            parts_of(random.Random(f"{self.seed} parts").choice(PART_BYTES)),
        ):
            try:
                self.scheduler.run(self._after_step)
            finally:
                self._end()
        demand(self.calm and self.ledger.finished, "I5", "the run did not finish")

    def _begin(self) -> None:
        while not self._create_run():
            self.scheduler.sleep(0.1)
        for worker in self.workers.values():
            self.scheduler.spawn(partial(self.supervise, worker), f"supervisor of {worker.name}")
        for machine in self.node.machines:
            self.scheduler.spawn(partial(self._supervise_machine, machine), f"supervisor of {machine.name}")
        together = random.Random(f"{self.seed} together")
        if not together.randrange(8):
            self.scheduler.spawn(self.faults.stop_everybody, "stop everybody", delay_s=together.uniform(10, 60))
        idle = random.Random(f"{self.seed} names that are idle")
        for number in range(idle.choice([0, 0, 0, 1, 3])):
            act = partial(self.faults.be_idle, f"idle{number}")
            self.scheduler.spawn(act, f"idle {number}", self.fate, delay_s=idle.uniform(0, 60))
        self.faults.run(CALM_ROUNDS)
        self.faults.end()
        self.calm, self.calm_at = True, self.scheduler.now

    def _create_run(self) -> bool:
        """Whether that is done, by the process that leads."""
        service, task = self.node.service, self.scheduler.current
        if service is None:
            return False
        group, task.group = task.group, self.node.group
        try:
            service.create_run(self.spec, Actor())
            for hostile in self.hostiles:
                request = TokenRequest(scope=Scope.WORKER, names=1)
                self.hostile_token = service.new_token(request, Actor()).token
                self.scheduler.spawn(hostile.live, hostile.name, group)
        except Problem as problem:
            if problem.slug != "superseded":
                raise
            return False
        finally:
            task.group = group
        return True

    def supervise(self, worker: WorkerNode) -> None:
        """Starts the worker again whenever it ended before the run did; after a while."""
        self.scheduler.sleep(worker.rng.uniform(0, 5))
        while not worker.finished:
            if not worker.running:
                down_s = worker.rng.choice([0.5, 3.0, 25.0])
                self.scheduler.sleep(0.5 if self.calm else down_s)
                worker.start()
            self.scheduler.sleep(0.5)

    def _supervise_machine(self, machine: Machine) -> None:
        while not (self.calm and self.ledger.finished and all(w.finished for w in self.workers.values())):
            if machine.group.dead and not self.node.is_gone(machine):
                self.disturbed_at = self.scheduler.now
                self.scheduler.sleep(0.2 if self.calm else machine.rng.choice([0.2, 4.0, 40.0]))
                machine.start()
            self.scheduler.sleep(0.2)
        if not machine.group.dead:
            machine.crash(power=False)  # the end: nothing may be left that runs

    def _after_step(self) -> None:
        now = self.scheduler.now
        if self.scheduler.steps > MAX_STEPS:
            raise Violation(f"I5: {MAX_STEPS} steps, and no end: {self._why()}")
        self.trace.update(f"{now!r} {self.ledger.round} {sum(self.ledger.units.values())}".encode())
        self.ledger.check(self.scheduler.ran)
        if now >= self.look_at:
            self.look_at = now + LOOK_S
            self._check_held(now)
            self._check_leases(now)
        if self.ledger.round != self.last_round:
            self.last_round, self.progressed_at = self.ledger.round, now
        quiet_s = now - max(self.disturbed_at, self.progressed_at)
        if not self.ledger.finished and quiet_s > PATIENCE_S:
            raise Violation(
                f"I5: round {self.ledger.round} did not close in {quiet_s:.0f} s without a fault: {self._why()}"
            )
        if quiet_s > 2 * PATIENCE_S:
            raise Violation(f"I5: the workers did not end: {self._why()}")

    def _check_held(self, now: float) -> None:
        """I12: once most workers have contributed, or one of two, a fragment waits no longer than the grace for workers
        that make no progress. The time that the fastest needs for H comes first."""
        hung = {name for name, worker in self.workers.items() if worker.hung_until > now}
        held = set[tuple[int, int]]()
        opening = self.node.run.open if hung and self.calm_at is not None and self.node.up else None
        if opening is not None and self.node.run.redo is None:
            assigned = opening.assigned & self.node.run.members.live()
            for index, fragment in enumerate(opening.fragments):
                there = assigned & fragment.contributed.keys()
                least = max(self.min_workers, len(assigned) // 2 + (len(assigned) > 2))
                quorum = len(there) >= least
                early = now < opening.grace_from
                if fragment.state == "collecting" and quorum and not early and assigned - there <= hung:
                    held.add((opening.number, index))
        self.held_since = {key: self.held_since.get(key, now) for key in held}
        for (round_, index), since in self.held_since.items():
            waited_s = now - max(since, self.disturbed_at, (self.calm_at or now) + SETTLE_S)
            demand(
                waited_s <= GRACE_MAX_S + SLACK_S,
                "I12",
                f"fragment {index} of round {round_} has waited {waited_s:.0f} s for {', '.join(sorted(hung))}, "
                f"which make no progress: {self._why()}",
            )

    def _check_leases(self, now: float) -> None:
        """I7: a lease whose worker has been silent for `lease_s` ends."""
        overdue = set[str]()
        if self.node.service is not None and self.node.service.runs():
            members, clock = self.node.run.members, self.node.run.context.clock()
            overdue = {worker for worker in members.live() if not members.remaining_s(worker, clock)}
        self.overdue_since = {worker: self.overdue_since.get(worker, now) for worker in overdue}
        for worker, since in self.overdue_since.items():
            late_s = now - max(since, self.disturbed_at)
            demand(late_s <= SETTLE_S + SLACK_S, "I7", f"the lease of {worker} should have ended {late_s:.0f} s ago")

    def _why(self) -> str:
        states = {
            name: (worker.running, worker.finished, worker.problems[-2:]) for name, worker in self.workers.items()
        }
        run = self.node.run if self.node.up else None
        reasons = [] if run is None or run.open is None else [each.reason for each in run.open.fragments]
        return f"{run and status(run)} {reasons} {states}"

    def _started(self, service: Coordinator, directly: bool) -> None:
        if service.runs():
            self.ledger.restarted(service.run("sim"), directly=directly)

    def _fsync(self, descriptor: int) -> None:
        group = self.scheduler.current.group
        owners: list[Machine] = [*self.workers.values(), *self.node.machines]
        owner = next((each for each in owners if each.group is group), self.node.machines[0])
        owner.fsync(descriptor)

    def _end(self) -> None:
        self.ledger.close()
        for machine in self.node.machines:
            machine.disk.close()
        for worker in self.workers.values():
            worker.disk.close()


@contextmanager
def parts_of(least_bytes: int) -> Iterator[None]:
    """Payloads travel in parts of so many bytes."""
    real = line.UP_FAR_BYTES, line.DOWN_FAR_BYTES
    line.UP_FAR_BYTES = line.DOWN_FAR_BYTES = least_bytes, least_bytes
    try:
        yield
    finally:
        line.UP_FAR_BYTES, line.DOWN_FAR_BYTES = real


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for simulated disks: in memory, where the machine has that."""
    with tempfile.TemporaryDirectory(prefix="outerstep-simulation-", dir=MEMORY if MEMORY.is_dir() else None) as path:
        yield Path(path)


@cache
def _own_scratch() -> Path:
    """Of a process that was given none, until it ends."""
    resources = ExitStack()
    atexit.register(resources.close)
    return resources.enter_context(scratch())


def simulate(seed: int, base: Path | None = None) -> Report:
    """Run one seed, with its files in `base`; the report says what failed, if anything did."""
    logging.disable(logging.CRITICAL)
    report = Report(seed)
    root = Path(tempfile.mkdtemp(prefix=f"{seed}-", dir=base or _own_scratch()))
    simulation = Simulation(seed, root)
    try:
        simulation.run()
        simulation.ledger.finish()
    except Violation as violation:
        report.failure = str(violation)
    except Exception as error:  # noqa: BLE001 (the report says it)
        report.failure = (
            f"unexpected: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)[-20:])}"
        )
    finally:
        simulation.ledger.close()
        shutil.rmtree(root, ignore_errors=True)
        logging.disable(logging.NOTSET)
    report.rounds, report.steps = simulation.ledger.round, simulation.scheduler.steps
    report.checks, report.virtual_s = simulation.ledger.checks, simulation.scheduler.now - 1000.0
    report.faults = dict(simulation.faults.counts)
    if isinstance(simulation.node, Cluster):
        report.faults["terms"] = simulation.node.terms
        report.faults["coordinator gone for good"] = int(simulation.node.gone is not None)
        report.faults |= simulation.node.database.faults
        report.faults |= simulation.node.tasks_done
    if simulation.store is not None:
        report.faults["direct uploads"] = simulation.store.uploads
    for what, count in simulation.node.crashes.items():
        report.faults[f"crash {what}"] = count
    for hostile in simulation.hostiles:
        report.faults |= hostile.counts
        report.faults["rounds done again"] = simulation.ledger.redone
    for worker in simulation.workers.values():
        for what, count in (*worker.line.faults.items(), *((f"worker {k}", n) for k, n in worker.deaths.items())):
            report.faults[what] = report.faults.get(what, 0) + count
    report.trace = simulation.trace.hexdigest()[:16]
    return report
