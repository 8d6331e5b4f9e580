"""One worker as a simulated process: the real DiLoCo and client, a model of a few hundred parameters, plain SGD.

Its training is made to be read back: work unit u adds 1 to the element u of every fragment's pseudo-gradient, whatever
the parameters are. So a contribution's bytes say which units are in it, and how often.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from torch import nn

from protocol.errors import Problem, Remedy
from protocol.messages import DataSummary, EvaluationReport
from protocol.outer_step import F32
from tests.simulation.network import Line
from tests.simulation.world.disk import Disk
from tests.simulation.world.machine import Machine
from tests.simulation.world.scheduler import Scheduler
from worker.diloco import DiLoCo
from worker.errors import Stopped
from worker.link.client import TIMEOUT, Client

ELEMENTS = 512  # of a fragment, so units below this number can be told apart
SHARED_DATA = DataSummary(digest="0d" * 32, units=10)
ROUNDING = 0.1  # how far above its first value codecs may move a parameter
HARM = 0.1  # nats per token that one more costs, if it is in one fragment


class Toy(nn.Module):
    def __init__(self, fragments: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.values = nn.Parameter(torch.randn(fragments * ELEMENTS, generator=generator) * 0.1)


class HeldOut:
    """The held-out loss: 1, and more where a parameter is above its first value. Honest work only lowers parameters, so
    it never harms, however much or little there is of it."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self._first = Toy(fragments).values.detach().numpy().astype(np.float64)

    def loss(self, values: F32) -> float:
        """Return the loss of a model with these parameters, float32[fragments · ELEMENTS]."""
        above = np.maximum(values - self._first - ROUNDING, 0.0)
        return 1.0 + HARM * float(above.sum()) / self.fragments


class WorkerNode(Machine):
    """One worker's machine: its disk, its line, and the process that trains, if one does."""

    fsync_s = 0.02

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        rng: random.Random,
        root: Path,
        line: Line,
        token: Callable[[], str],
        over: Callable[[], bool],
        fragments: int,
        speed_s: float,
        keeps_state: bool,
        data: DataSummary,
    ) -> None:
        super().__init__(scheduler, rng, root, name)
        self.line, self.token = line, token
        self.over = over  # whether the run is
        self.fragments, self.speed_s, self.keeps_state = fragments, speed_s, keeps_state
        self.data = data
        self.diloco: DiLoCo | None = None
        self.client: Client | None = None
        self.finished = False
        self.hung_until = 0.0  # its training thread stands still till then, and its heartbeats go on
        self.deaths: dict[str, int] = {}
        self.problems: list[str] = []

    @property
    def running(self) -> bool:
        return not self.group.dead

    def serve(self) -> None:
        self.hung_until = 0.0
        try:
            self._train()
        except Stopped:
            pass
        except (Problem, httpx.TransportError) as problem:
            # What `outerstep worker` makes of it. Its supervisor starts it again, except where it is refused for good:
            # that must not happen to an honest worker, or the run goes on without it for ever.
            if not isinstance(problem, Problem):
                self.problems.append(type(problem).__name__)
            else:
                self.problems.append(problem.slug)
                if problem.remedy is Remedy.REFUSED and problem.slug != "worker-name-taken":
                    raise AssertionError(f"I5: {self.name} was refused for good: {problem}") from problem
        self.finished = self.over()
        self.diloco = None
        self.group.dead = True

    def _train(self) -> None:
        model, held_out = Toy(self.fragments), HeldOut(self.fragments)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = self.scheduler
        with httpx.Client(base_url="http://sim", transport=self.line, timeout=TIMEOUT, trust_env=False) as http:
            client = Client(
                http, "sim", self.token(), rng=random.Random(self.rng.random()), clock=lambda: scheduler.now
            )
            self.client = client
            diloco = DiLoCo(
                model,
                optimizer,
                client=client,
                run=client.run_detail(),
                name=self.name,
                state_dir=self.data_dir if self.keeps_state else None,
                data=self.data,
                evaluate=lambda: EvaluationReport(loss=held_out.loss(model.values.detach().numpy()), tokens=1),
                clock=lambda: scheduler.now,
            )
            self.diloco = diloco
            with diloco:
                loss = torch.tensor(1.0)
                # Of workers with data of their own no two send the same, or one would count as the other's copy.
                length = 1.0 + 0.004 * (self.data.units % 5)
                for unit in diloco.units():
                    scheduler.sleep(self.speed_s * self.rng.uniform(0.5, 1.5))
                    while self.hung_until > scheduler.now:
                        scheduler.sleep(self.hung_until - scheduler.now)
                    gradient = torch.zeros_like(model.values)
                    gradient[unit % ELEMENTS :: ELEMENTS] = length
                    model.values.grad = gradient
                    diloco.report_loss(loss)
                    optimizer.step()

    def steps_left(self) -> int:
        """The inner steps that are left of the round's H, with the one in hand; 0 where it trains none."""
        rounds = self.rounds() if self.running else None
        if rounds is None or not rounds.training or self.diloco is None:
            return 0
        ahead = rounds.carry.steps_ahead if self.diloco.spec.sync.wait == "never" else 0
        return max(rounds.assignment.inner_steps - ahead - self.diloco.inner_step, 0)

    def stop(self) -> None:
        """SIGTERM."""
        if self.client is not None and self.running:
            self.client.stop.set()

    def crash(self, *, power: bool) -> None:
        self.deaths["power" if power else "kill"] = self.deaths.get("power" if power else "kill", 0) + 1
        super().crash(power=power)

    def crashing(self) -> None:
        self.diloco = self.client = None

    def lose_disk(self) -> None:
        """The machine comes back with a new disk."""
        self.generation += 1
        self.data_dir = self.root / f"{self.name}-{self.generation}"
        self.data_dir.mkdir()
        self.disk.close()
        self.disk = Disk()

    def held(self) -> Any:
        """The outer state that the process holds, if it holds one."""
        state = self.diloco.joined.state if self.diloco is not None and self.diloco.has_joined else None
        return None if state is None or state.round is None else state

    def rounds(self) -> Any:
        """The way of the process through the rounds, if it has begun one."""
        return self.diloco.joined.rounds if self.diloco is not None and self.diloco.has_joined else None
