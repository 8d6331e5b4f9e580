"""Hostile workers of a real run: `outerstep.DiLoCo` with another last stage before the upload."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.robust.ascent import Vectors
from protocol.messages import WithoutLosses, WithoutReport
from protocol.spec.run import RunSpec
from worker.diloco import DiLoCo, Joined
from worker.link.client import Client
from worker.privacy.release import Release
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


class HostileRelease(Release):
    """Sends an attack in place of the pseudo-gradients. `hold`: waits until this round is over, so that its work comes
    late, with the next."""

    def __init__(self, attack: Attack, diloco: "HostileDiLoCo", state: OuterState) -> None:
        self._attack, self._diloco, self._state = attack, diloco, state
        self._fragments = Fragments(diloco.model, state.layout)
        self._updates: list[Tensor] = []

    def together(self, made: Iterable[Contribution], fragments: Sequence[int]) -> Iterable[Contribution]:
        made = list(made)
        updates = self._attack.updates(self._diloco.round, self._state, [each.delta for each in made])
        self._diloco.hold(self._diloco.round)
        return [_with(each, values) for each, values in zip(made, updates, strict=True)]

    def count(self, fragments: Sequence[int]) -> None:
        """Without waiting for deltas, the fragments are made one by one, after this."""
        honest = [theta - self._fragments.gather(p) for p, theta in enumerate(self._state.theta)]
        self._updates = self._attack.updates(self._diloco.round, self._state, honest)

    def alone(self, made: Contribution) -> Contribution:
        return _with(made, self._updates[made.fragment])


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
            joined.rounds._exchange.release = HostileRelease(attack, self, joined.state)  # noqa: SLF001
        return joined

    def hold(self, round_: int) -> None:
        """Wait until the round is over, if this worker's work is to be late."""
        while self._late and round_ % 2 == 0 and not self.client.stop.wait(POLL_S):
            if self.client.run_detail().round > round_:
                break
