"""One soak: a real coordinator, six real workers, a harmful proxy between them, slow and lossy lines, and kills.

Everything that is drawn comes from the plan's seed: which round each victim dies in and how far into it. What the
machine makes of that (who waits for whom) is its own; the verdict must hold whatever it is.
"""

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.coordinator import CoordinatorProcess, Running
from harness.lines import Shape, slow_lines, why_not
from outerstep.common.exit_codes import Exit
from protocol.messages import Scope
from tests.soak.proxy import Proxy
from tests.support.text import write_text
from tests.support.workers import WorkerProcess

WORKERS = [f"w{number}" for number in range(6)]
SLOW = {
    "w0": Shape(up_mbit=2, down_mbit=10, round_trip_s=0.02, loss=0.005),
    "w1": Shape(up_mbit=2, down_mbit=10, round_trip_s=0.08, loss=0.005),
}
DECADE = 10  # rounds in which each worker is killed once, and the coordinator twice
STEP_S = 0.25

SPEC = """
name = "soak"
seed = {seed}
[model]
factory = "tests.soak.model:build"
[data]
source = "{text}"
sequence_length = 64
[inner]
batch_size = 4
learning_rate = 2e-3
warmup_steps = 10
[outer]
momentum = 0.5
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
fragment_elements = 50000
[members]
min_workers = 3
lease_s = {lease_s}
grace_factor = 0.05
grace_min_s = 3
[checkpoints]
every_rounds = 3
[evaluation]
max_tokens = 4096
"""


@dataclass(frozen=True)
class Plan:
    """How long, and with which luck. `round_s`: seconds of inner steps per round."""

    seed: int
    rounds: int
    round_s: float

    @property
    def inner_steps(self) -> int:
        return round(self.round_s / STEP_S)

    def spec(self, text: Path) -> str:
        lease_s = max(30.0, self.round_s)  # longer than a restart takes
        return SPEC.format(
            seed=self.seed,
            text=text,
            rounds=self.rounds,
            inner_steps=self.inner_steps,
            lease_s=lease_s,
        )

    def kills(self) -> list[tuple[float, str]]:
        """(rounds since the beginning, whom): each worker once per decade, the coordinator twice.

        None in the first and the last round of a decade: a run's start and end are not what is measured.
        """
        rng = random.Random(self.seed)
        drawn = []
        for first in range(0, self.rounds, DECADE):
            last = min(first + DECADE, self.rounds) - 1
            drawn += [(rng.uniform(first + 1, last), whom) for whom in [*WORKERS, "coordinator", "coordinator"]]
        return sorted(drawn)


@dataclass
class Outcome:
    """What happened: for the verdict."""

    plan: Plan
    data_dir: Path
    lines: str
    started: float = 0.0  # these are of the machine's monotonic clock
    ended: float = 0.0
    kills: list[tuple[float, str]] = field(default_factory=list)
    exits: list[tuple[str, int]] = field(default_factory=list)
    too_late: set[str] = field(default_factory=set)  # who came back, after its last kill, when the run was over
    steps: dict[str, list[float]] = field(default_factory=dict)
    harm: dict[str, int] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)  # REST answers, by path


class Worker(WorkerProcess):
    """Behind a line or not. Restarted as a service manager would: at once, unless it is done or was refused."""

    def __init__(self, prefix: list[str], url: str, name: str, token: str, folder: Path) -> None:
        super().__init__(url, "soak", name, token, folder / name)
        self._command = [*prefix, *self._command, "--allow-code", "tests.soak.model:build"]
        self.steps = folder / f"{name}.steps"
        self._environment |= {"SOAK_STEP_S": str(STEP_S), "SOAK_STEPS": str(self.steps)}

    def tend(self) -> int | None:
        """Start it again where that is worth it; the exit code of a process that has ended by itself."""
        code = self.process.poll() if self.process is not None else None
        if code == Exit.RETRY:
            self.start()
        return code


def soak(plan: Plan, folder: Path, *, patience_s: float, say: Callable[[str], None]) -> Outcome:
    """Run it to the end in `folder`, which is empty. AssertionError where it does not end in `patience_s`."""
    folder.mkdir(exist_ok=True)
    reason = why_not()
    condition = "2 Mbit/s up, 10 down, 0.5 % loss, 20 ms for w0 and 80 ms for w1"
    outcome = Outcome(plan, folder / "data", condition if reason is None else f"no slow lines here: {reason}")
    say(f"lines: {outcome.lines}")
    coordinator = CoordinatorProcess(folder / "data")
    workers: dict[str, Worker] = {}
    with ExitStack() as cleanup:
        running = coordinator.start()
        cleanup.callback(coordinator.kill)
        lines = cleanup.enter_context(slow_lines(SLOW if reason is None else {}, seed=plan.seed))
        proxy = cleanup.enter_context(Proxy(coordinator.port, plan.seed, mean_bytes=600_000, delay_s=0.04))
        running.create_run(plan.spec(write_text(folder / "text", seed=plan.seed, files=24)))
        token = running.token(Scope.WORKER)
        for name in WORKERS:
            line = lines.get(name)
            address, port = proxy.listen("127.0.0.1" if line is None else line.address, name)
            prefix = [] if line is None else line.prefix
            workers[name] = Worker(prefix, f"http://{address}:{port}", name, token, folder)
            workers[name].start()
            cleanup.callback(workers[name].kill)
        _until_finished(plan, running, coordinator, workers, outcome, patience_s, say)
        for name, worker in workers.items():
            outcome.exits.append((name, worker.wait()))
            outcome.steps[name] = [float(line) for line in worker.steps.read_text().split()]
            if "the run soak is finished" in worker.log.read_text():
                outcome.too_late.add(name)
        outcome.harm = dict(proxy.harm)
        with running.client() as client:
            for path in ("", "/workers", "/rounds?limit=1000", "/events?limit=1000", "/checkpoints/latest"):
                outcome.info[path] = client.get(f"/v1/runs/soak{path}").raise_for_status().json()
    return outcome


def _until_finished(
    plan: Plan,
    running: Running,
    coordinator: CoordinatorProcess,
    workers: dict[str, Worker],
    outcome: Outcome,
    patience_s: float,
    say: Callable[[str], None],
) -> None:
    """Kill as planned and start again, until the run is finished."""
    due, give_up_at = plan.kills(), time.monotonic() + patience_s
    round_, opened_at = -1, 0.0
    ticking = threading.Event()  # never set: a way to wait
    with running.client() as client:
        while True:
            assert time.monotonic() < give_up_at, f"not finished after {patience_s:.0f} s, in round {round_}"
            ticking.wait(0.1)
            run = client.get("/v1/runs/soak").raise_for_status().json()
            now = time.monotonic()
            if run["state"] == "finished":
                outcome.ended = now
                return
            if run["round"] > round_ and client.get("/v1/runs/soak/rounds/current").is_success:
                round_, opened_at = run["round"], now
                outcome.started = outcome.started or now
                say(f"round {round_}: held-out loss {run['held_out_loss']}, {run['reason']}")
            for name, worker in workers.items():
                code = worker.tend()
                if code is not None:
                    outcome.exits.append((name, code))
                    assert code == Exit.RETRY, f"{name} ended with {code}: {worker.log.read_text()[-2000:]}"
            if round_ < 0:
                continue
            at = round_ + min((now - opened_at) / plan.round_s, 1.0)
            while due and due[0][0] <= at:
                _, whom = due.pop(0)
                outcome.kills.append((now, whom))
                say(f"kill -9 {whom}")
                victim = coordinator if whom == "coordinator" else workers[whom]
                victim.kill()
                victim.start()


def show(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
