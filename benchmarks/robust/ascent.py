"""Projected gradient ascent: the update that raises the next state's held-out loss most, within every bound of
screening.

A hostile worker trains honestly first, so it knows its own pseudo-gradient g, and it has seen every delta. It predicts
the state that the round leads to without it, and takes steps of gradient ascent there, on text that everybody has, over
updates of a fixed norm. From each it removes the component along g and the last deltas, which it shares with the
others' pseudo-gradients, and mixes in a share of g instead. So its norm and its cosines with the others are honest
ones.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protocol.codecs import CODECS
from protocol.fragments import Layout
from protocol.spec.run import RunSpec
from worker.codecs import round_trip
from worker.data.training_set import TrainingSet
from worker.inner.loss import mean_loss
from worker.models.building import build_model
from worker.privacy.release import Release
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.work import Contribution

CPU = torch.device("cpu")
KNOWN = 2  # deltas to which the update is orthogonal


@dataclass(frozen=True)
class Plan:
    """How the hostile workers attack.

    share      C, the cosine of the update with the attacker's honest pseudo-gradient
    length     of the update, as a multiple of the honest one's norm
    every      attack in one of this many rounds, the last of them, and be honest in the others
    steps      of gradient ascent
    reach      how far beyond the update itself the ascent looks: 1 for the next state; more because momentum repeats it
    """

    share: float = 0.5
    length: float = 1.2
    every: int = 1
    steps: int = 24
    reach: float = 1.0

    def is_on(self, round_: int) -> bool:
        return round_ % self.every == self.every - 1


class Ascent:
    """Computes the updates of `hostile` of `workers` workers, which collude: all move the same way."""

    def __init__(
        self, plan: Plan, spec: RunSpec, data: TrainingSet, layout: Layout, hostile: int, workers: int
    ) -> None:
        self.plan, self._spec, self._fraction = plan, spec, hostile / workers
        self._model = build_model(spec, CPU)
        self._parameters = list(self._model.parameters())
        self._fragments = Fragments(self._model, layout)
        self._batches = list(data.held_out_batches(spec.evaluation.max_tokens))
        self._lock = threading.Lock()
        self._deltas: dict[int, list[Tensor]] = {}  # by round, those published in it, by fragment
        self._momentum: tuple[int, list[Tensor]] | None = None
        self._found: tuple[int, list[Tensor]] | None = None  # the last round's direction, which others use as well
        self._at = 0

    def note(self, round_: int, state: OuterState) -> None:
        """Note the deltas that led to state `round_`, from the momentum before it."""
        with self._lock:
            if self._momentum is not None and self._momentum[0] == round_ - 1:
                beta = self._spec.outer.momentum
                before = self._momentum[1]
                self._deltas[round_ - 1] = [new - beta * old for new, old in zip(state.momentum, before, strict=True)]
            if self._momentum is None or self._momentum[0] < round_:
                self._momentum = round_, [each.clone() for each in state.momentum]

    def updates(self, round_: int, state: OuterState, honest: Sequence[Tensor]) -> list[Tensor]:
        """Return what to send instead of the `honest` pseudo-gradients, float32[n] by fragment."""
        direction = self._direction(round_, state, honest)
        share = self.plan.share
        sent = []
        for own, away in zip(honest, direction, strict=True):
            values = share * own / own.norm() + (1 - share**2) ** 0.5 * _without(away, [own])
            sent.append(self._as_long(values, own))
        return sent

    def _as_long(self, values: Tensor, own: Tensor) -> Tensor:
        """Scale `values` so that what is received has `length` times the norm of the honest ones as received."""
        codec = self._spec.sync.upload_codec
        received = round_trip(values, codec).norm()
        return values * (self.plan.length * round_trip(own, codec).norm() / received)

    def _direction(self, round_: int, state: OuterState, honest: Sequence[Tensor]) -> list[Tensor]:
        """Return the direction of ascent by fragment, of norm 1."""
        with self._lock:
            if self._found is None or self._found[0] != round_:
                self._found = round_, self._ascend(round_, state, honest)
            return self._found[1]

    def _ascend(self, round_: int, state: OuterState, honest: Sequence[Tensor]) -> list[Tensor]:
        plan, lr, beta = self.plan, self._spec.outer.learning_rate, self._spec.outer.momentum
        past = [self._deltas[each] for each in sorted(self._deltas)[-KNOWN:]]
        lasting = 1 - self._fraction * (1 - plan.share * plan.length)
        norms = [float(own.norm()) for own in honest]
        # The state that the others lead to, as it is evaluated.
        start = [theta - lr * lasting * own for theta, own in zip(state.theta, honest, strict=True)]
        if plan.reach > 1:
            start = [each - lr * beta * beta * u for each, u in zip(start, state.momentum, strict=True)]
        known = [[own, *(each[p] for each in past)] for p, own in enumerate(honest)]
        size = [plan.reach * lr * self._fraction * plan.length * norm * (1 - plan.share**2) ** 0.5 for norm in norms]
        generator = torch.Generator().manual_seed(round_)
        away = [torch.randn(len(own), generator=generator) for own in honest]
        away = [_without(each, own) for each, own in zip(away, known, strict=True)]
        if self._found is not None:
            away = [_without(each, own) for each, own in zip(self._found[1], known, strict=True)]
        scale = 0.05 if self._found is None else 1.0
        for step in range(plan.steps):
            for p, (theta, each) in enumerate(zip(start, away, strict=True)):
                self._fragments.scatter(p, theta - scale * size[p] * each)
            gradient = self._gradient()
            scale = 1.0
            rate = 1.0 if step == 0 else 0.5
            for p, each in enumerate(away):
                uphill = _without(-gradient[p], known[p])  # the update is subtracted
                mixed = (1 - rate) * each + rate * uphill
                away[p] = mixed / mixed.norm()
        return away

    def _gradient(self) -> list[Tensor]:
        """Return the gradient of the loss on the next public batch, by fragment."""
        batch = self._batches[self._at % len(self._batches)]
        self._at += 1
        self._model.zero_grad()
        loss = mean_loss(self._model, batch)
        loss.backward()
        return self._gathered()

    def _gathered(self) -> list[Tensor]:
        """Return the gradients in the layout of the fragments."""
        values = [each.detach().clone() for each in self._parameters]
        with torch.no_grad():
            for each in self._parameters:
                assert each.grad is not None
                each.copy_(each.grad)
        found = [self._fragments.gather(p) for p in range(len(self._fragments))]
        with torch.no_grad():
            for each, before in zip(self._parameters, values, strict=True):
                each.copy_(before)
        return found


def _without(values: Tensor, known: Sequence[Tensor]) -> Tensor:
    """Return the component of `values` that is orthogonal to all `known`, of norm 1."""
    basis, _ = torch.linalg.qr(torch.stack([each / each.norm().clamp(min=1e-12) for each in known], dim=1))
    left = values - basis @ (basis.T @ values)
    return left / left.norm().clamp(min=1e-30)


class HostileRelease(Release):
    """Sends the attack in place of the contributions."""

    def __init__(self, ascent: Ascent, state: OuterState) -> None:
        self._ascent, self._state = ascent, state

    def together(self, made: Iterable[Contribution], fragments: Sequence[int]) -> Iterable[Contribution]:
        made = list(made)
        round_ = made[0].round
        self._ascent.note(round_, self._state)
        if len(made) < len(self._state) or not self._ascent.plan.is_on(round_):
            return made
        sent = self._ascent.updates(round_, self._state, [each.delta for each in made])
        return [replace(each, delta=values, norm=float(values.norm())) for each, values in zip(made, sent, strict=True)]
