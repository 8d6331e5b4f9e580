"""Hostile workers of a real run: `outerstep.DiLoCo` that sends something else."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.robust.ascent import Vectors
from protocol.messages import Assignment, WithoutLosses, WithoutReport
from protocol.spec.run import RunSpec
from worker.diloco import DiLoCo, Joined
from worker.link.client import Client
from worker.rounds.round import Round
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.work import Contribution

POLL_S = 0.05


class Attack(Protocol):
    def updates(self, round_: int, state: OuterState, honest: Vectors) -> list[Tensor]:
        """Return what to send instead of the `honest` pseudo-gradients."""


class FreeRider:
    """Sends the last delta and noise, an honest norm in all: what the others have trained."""

    def __init__(self, spec: RunSpec) -> None:
        self._beta, self._draw = spec.outer.momentum, torch.Generator().manual_seed(spec.seed)
        self._before: list[Tensor] | None = None
        self._deltas: list[Tensor] | None = None

    def updates(self, round_: int, state: OuterState, honest: Vectors) -> list[Tensor]:
        if self._before is not None:
            self._deltas = [new - self._beta * old for new, old in zip(state.momentum, self._before, strict=True)]
        self._before = [each.clone() for each in state.momentum]
        if self._deltas is None:
            return list(honest)
        sent = []
        for delta in self._deltas:
            noise = torch.randn(len(delta), generator=self._draw)
            sent.append(delta + noise * (delta.norm() / noise.norm()))
        return sent


class HostileRound:
    """Makes `round_` send an attack in place of its pseudo-gradients. The fragments of these runs are sent together, so
    the attack is computed before the first one. `diloco.hold` may delay all of them."""

    def __init__(self, round_: Round, attack: Attack, diloco: "HostileDiLoCo", state: OuterState) -> None:
        self._attack, self._diloco, self._state = attack, diloco, state
        self._fragments = Fragments(diloco.model, state.layout)
        self._updates: list[Tensor] = []
        flight = round_._in_flight  # noqa: SLF001
        self._send = flight.send
        flight.send = self.send  # type: ignore[method-assign]

    def send(self, p: int, make: Callable[[], Contribution]) -> None:
        if not self._updates:
            honest = [theta - self._fragments.gather(q) for q, theta in enumerate(self._state.theta)]
            self._updates = self._attack.updates(self._diloco.round, self._state, honest)
            self._diloco.hold(self._diloco.round)
        self._send(p, lambda: _with(make(), self._updates[p]))


def _with(made: Contribution, values: Tensor) -> Contribution:
    return replace(made, delta=values, norm=float(values.norm()))


class LyingClient(Client):
    """Reports that the held-out loss is lower without the last worker by name, and higher without any other."""

    def report_without(self, member_token: str, state_round: int, redone: int, report: WithoutReport) -> None:
        loss, workers = report.reached.loss, report.reached.without
        without = {worker: loss + (-1.0 if worker == max(workers) else 0.5) for worker in workers}
        super().report_without(
            member_token, state_round, redone, WithoutReport(reached=WithoutLosses(loss=loss, without=without))
        )


class HostileDiLoCo(DiLoCo):
    """A worker with an attack, which `make_attack` makes once it has joined; None: it sends its own work. `late`: every
    second round, that comes too late."""

    def __init__(
        self, make_attack: Callable[[OuterState], Attack | None], *args: Any, late: bool, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._make_attack, self._late = make_attack, late

    def _join(self, resources: ExitStack) -> Joined:
        joined = super()._join(resources)
        attack = self._make_attack(joined.state)
        if attack is not None:
            begin = joined.rounds._begin  # noqa: SLF001

            def begin_hostile(assignment: Assignment) -> Round | None:
                round_ = begin(assignment)
                if round_ is not None:
                    HostileRound(round_, attack, self, joined.state)
                return round_

            joined.rounds._begin = begin_hostile  # type: ignore[method-assign] # noqa: SLF001
        return joined

    def hold(self, round_: int) -> None:
        """Wait until the round is over, if this worker's work is to be late."""
        while self._late and round_ % 2 == 0 and not self.client.stop.wait(POLL_S):
            if self.client.run_detail().round > round_:
                break
