"""Projected gradient ascent: the update that raises the next state's held-out loss most, within the bounds of
screening.

A hostile worker trains honestly first, so it knows its own pseudo-gradient g, and it has seen every delta. It predicts
the state that the round leads to, and takes steps of gradient ascent there, on text that every worker has, over updates
of one norm. From each it removes the component along g and the last deltas, which it shares with the others'
pseudo-gradients, and mixes in the share C of g instead. So its norm, and its cosines with the others, are within the
bounds.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.fragments import Layout
from protocol.spec.run import RunSpec
from worker.codecs import round_trip
from worker.data.training_set import TrainingSet
from worker.inner.loss import mean_loss
from worker.models.building import build_model
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState

CPU = torch.device("cpu")
KNOWN_DELTAS = 2
STEPS = 16  # of gradient ascent
KEPT = 0.5  # of the direction, in each step
BATCHES = 8  # on which losses are compared
HALVINGS = 6

Vectors = Sequence[Tensor]  # float32[n] of each fragment


@dataclass(frozen=True)
class Plan:
    """How hostile workers attack.

    share    C, the cosine of the update with the attacker's honest pseudo-gradient
    length   norm of the update, as a multiple of the honest one's
    every    attack in the last of this many rounds, and be honest in the others
    only     the single round of the attack, negative from the end; None: all
    rise     by how much the next state's loss may exceed the current one's; None: by anything. C is raised to fit
    harm     by how much the next state's loss may exceed what it would be without the attackers
    ahead    raise the loss at the point that the next round starts from, which momentum leads beyond the next state
    masked   the update is orthogonal to the current state's gradient too, so a small step along it does no harm
    """

    share: float = 0.5
    length: float = 1.2
    every: int = 1
    only: int | None = None
    rise: float | None = None
    harm: float | None = None
    ahead: bool = False
    masked: bool = False

    def is_on(self, round_: int, rounds: int) -> bool:
        if self.only is not None:
            return round_ == self.only % rounds
        return round_ % self.every == self.every - 1


class Ascent:
    """Computes the updates of `hostile` of `workers` workers, which all move the same way. Thread-safe."""

    def __init__(
        self, plan: Plan, spec: RunSpec, data: TrainingSet, layout: Layout, hostile: int, workers: int
    ) -> None:
        self.plan, self._spec, self._weight = plan, spec, hostile / workers
        self._model = build_model(spec, CPU)
        self._parameters = list(self._model.parameters())
        self._fragments = Fragments(self._model, layout)
        self._batches = list(data.held_out_batches(spec.evaluation.max_tokens))
        self._lock = threading.Lock()
        self._momenta: dict[int, list[Tensor]] = {}  # by state
        self._found: tuple[bytes, list[Tensor], float] | None = None  # the last state, its direction and C
        self._next_batch = 0

    def updates(self, round_: int, state: OuterState, honest: Vectors) -> list[Tensor]:
        """Return what to send instead of the `honest` pseudo-gradients; these if the plan does not attack in this
        round."""
        with self._lock:
            self._momenta[round_] = [each.clone() for each in state.momentum]
            if not self.plan.is_on(round_, self._spec.sync.rounds):
                return list(honest)
            at = state.digest()  # a round may be done again
            if self._found is None or self._found[0] != at:  # the first attacker computes it for all
                self._found = at, *self._ascend(round_, state, honest)
            _, away, share = self._found
        return [self._as_received(_mixed(own, each, share), own) for own, each in zip(honest, away, strict=True)]

    def _as_received(self, values: Tensor, own: Tensor) -> Tensor:
        """Scale the values so that their norm, as received, is `length` times that of the honest ones."""
        codec = self._spec.sync.upload_codec
        return values * (self.plan.length * round_trip(own, codec).norm() / round_trip(values, codec).norm())

    def _ascend(self, round_: int, state: OuterState, honest: Vectors) -> tuple[list[Tensor], float]:
        """Return the direction of the ascent, of norm 1 in each fragment, and C."""
        plan, deltas = self.plan, self._last_deltas(round_)
        known = [[own, *past] for own, *past in zip(honest, *deltas, strict=True)]
        if plan.masked:
            self._load(state.theta)
            known = [[*each, gradient] for each, gradient in zip(known, self._gradient(BATCHES), strict=True)]
        generator = torch.Generator().manual_seed(self._spec.seed)
        first = [torch.randn(len(own), generator=generator) for own in honest]
        bases, along = [_basis(each) for each in known], [_unit(own) for own in honest]
        away = [
            _outside(each, basis)
            for each, basis in zip(first if self._found is None else self._found[1], bases, strict=True)
        ]
        # What the others have in common with this worker: the projection of their mean on its own pseudo-gradient.
        others = [
            own * (min(float(past.norm() / own.norm()), 1.0) ** 2)
            for own, past in zip(honest, deltas[-1] if deltas else honest, strict=True)
        ]

        def delta(share: float) -> list[Tensor]:
            """Return the mean with the attack in it."""
            weight, across = self._weight, (1 - share**2) ** 0.5
            return [
                (1 - weight) * mean + weight * plan.length * own.norm() * (share * g + across * d)
                for mean, own, g, d in zip(others, honest, along, away, strict=True)
            ]

        for _ in range(STEPS):
            self._load(self._next(state, delta(plan.share), ahead=plan.ahead))
            # The update is subtracted from the state.
            uphill = [_outside(-each, basis) for each, basis in zip(self._gradient(1), bases, strict=True)]
            away = [_unit(KEPT * old + (1 - KEPT) * new) for old, new in zip(away, uphill, strict=True)]
        share = plan.share
        if plan.rise is not None or plan.harm is not None:
            bounds = []
            if plan.rise is not None:
                bounds.append(self._loss([state.reached(p) for p in range(len(state))]) + plan.rise)
            if plan.harm is not None:
                bounds.append(self._loss(self._next(state, others)) + plan.harm)
            low, share = plan.share, 1.0
            for _ in range(HALVINGS):
                middle = (low + share) / 2
                fits = self._loss(self._next(state, delta(middle))) <= min(bounds)
                low, share = (low, middle) if fits else (middle, share)
        return away, share

    def _next(self, state: OuterState, delta: Vectors, *, ahead: bool = False) -> list[Tensor]:
        """Return the state after this delta: as it is evaluated, or (`ahead`) as the next round starts from it."""
        lr, beta = self._spec.outer.learning_rate, self._spec.outer.momentum
        if not ahead:
            return [theta - lr * each for theta, each in zip(state.theta, delta, strict=True)]
        parts = zip(state.theta, state.momentum, delta, strict=True)
        return [theta - lr * (beta * beta * u + (1 + beta) * each) for theta, u, each in parts]

    def _last_deltas(self, round_: int) -> list[Vectors]:
        """Return the deltas of the last rounds, from the momentum before and after each."""
        beta, states = self._spec.outer.momentum, range(max(round_ - KNOWN_DELTAS, 0), round_)
        pairs = [(self._momenta[s], self._momenta[s + 1]) for s in states if {s, s + 1} <= self._momenta.keys()]
        return [[after - beta * before for before, after in zip(*each, strict=True)] for each in pairs]

    def _load(self, values: Vectors) -> None:
        for p, each in enumerate(values):
            self._fragments.scatter(p, each)

    def _loss(self, values: Vectors) -> float:
        """Return the loss of the model with these parameters on public text."""
        self._load(values)
        with torch.no_grad():
            return sum(float(mean_loss(self._model, each)) for each in self._batches[:BATCHES]) / BATCHES

    def _gradient(self, batches: int) -> list[Tensor]:
        """Return the gradient of the loaded parameters, on the next batches of public text."""
        self._model.zero_grad()
        for _ in range(batches):
            mean_loss(self._model, self._batches[self._next_batch % len(self._batches)]).backward()
            self._next_batch += 1
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.copy_(gradient)
        return [self._fragments.gather(p) for p in range(len(self._fragments))]


def _unit(values: Tensor) -> Tensor:
    return values / values.norm().clamp(min=1e-30)


def _basis(known: Sequence[Tensor]) -> Tensor:
    """Return orthonormal vectors that span the known ones, float32[n, known]."""
    return torch.linalg.qr(torch.stack([_unit(each) for each in known], dim=1)).Q


def _outside(values: Tensor, basis: Tensor) -> Tensor:
    """Return the component of `values` that is orthogonal to the basis, of norm 1."""
    return _unit(values - basis @ (basis.T @ values))


def _mixed(own: Tensor, away: Tensor, share: float) -> Tensor:
    """Return the vector of norm 1 that has the cosine `share` with `own`, and is along `away` otherwise."""
    along = _unit(own)
    return share * along + (1 - share**2) ** 0.5 * _outside(away, along[:, None])
