"""What hostile and broken workers send instead of their honest pseudo-gradients, and in which rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The honest pseudo-gradients of all workers for a fragment, those of hostile workers first, float32[workers, n]; the
# number of hostile workers; the deltas published so far, float32[n] each; randomness
# -> what the hostile workers send, float32[hostile, n].
Values = Callable[[Tensor, int, Sequence[Tensor], np.random.Generator], Tensor]


@dataclass(frozen=True)
class Attack:
    """An attack. `every`: the hostile workers contribute to one in this many rounds and miss the others. `only`: the
    single round of the attack, with honest contributions otherwise; None: all rounds."""

    values: Values
    every: int = 1
    only: int | None = None

    def is_on(self, round_: int) -> bool:
        return self.only is None or round_ == self.only

    def misses(self, round_: int) -> bool:
        return round_ % self.every != self.every - 1


def times(factor: float) -> Values:
    return lambda honest, hostile, past, draw: honest[:hostile] * factor


def noise(factor: float) -> Values:
    def sent(honest: Tensor, hostile: int, past: Sequence[Tensor], draw: np.random.Generator) -> Tensor:
        values = torch.from_numpy(draw.standard_normal((hostile, honest.shape[1])).astype(np.float32))
        return _as_long(values, honest[:hostile], factor)

    return sent


def flipped(share: float, factor: float) -> Values:
    """Flip the sign of this share of the values, always the same ones, evenly spread."""

    def sent(honest: Tensor, hostile: int, past: Sequence[Tensor], draw: np.random.Generator) -> Tensor:
        place = torch.arange(honest.shape[1], dtype=torch.float64) * share
        signs = 1.0 - 2.0 * (torch.floor(place + share) - torch.floor(place)).to(torch.float32)
        return honest[:hostile] * signs * factor

    return sent


def undo(honest: Tensor, hostile: int, past: Sequence[Tensor], draw: np.random.Generator) -> Tensor:
    """Negate the last two deltas, and add noise of the norm of an honest pseudo-gradient."""
    disguise = noise(1.0)(honest, hostile, past, draw)
    return disguise - torch.stack([*past[-2:]]).sum(0) if past else disguise


def less_the_mean(honest: Tensor, hostile: int, past: Sequence[Tensor], draw: np.random.Generator) -> Tensor:
    return (-0.5 * honest[hostile:].mean(0)).expand(hostile, -1)


def a_little(honest: Tensor, hostile: int, past: Sequence[Tensor], draw: np.random.Generator) -> Tensor:
    others = honest[hostile:]
    return (others.mean(0) - others.std(0)).expand(hostile, -1)


def bias(honest: Tensor, hostile: int, past: Sequence[Tensor], draw: np.random.Generator) -> Tensor:
    direction = torch.from_numpy(draw.standard_normal(honest.shape[1]).astype(np.float32))
    return honest[:hostile] + 0.5 * honest.norm(dim=1).mean() * direction / direction.norm()


def _as_long(values: Tensor, honest: Tensor, factor: float) -> Tensor:
    return values * (factor * honest.norm(dim=1, keepdim=True) / values.norm(dim=1, keepdim=True))


AWAY = "away"  # the hostile workers train and send nothing: shows the cost of their absence

ATTACKS: dict[str, Attack] = {
    "x1e6": Attack(times(1e6)),
    "x100-once": Attack(times(100.0), only=4),
    "x10": Attack(times(10.0)),
    "x1.2": Attack(times(1.2)),
    "noise-x10": Attack(noise(10.0)),
    "noise-x3.9": Attack(noise(3.9)),
    "noise": Attack(noise(1.0)),
    "flipped": Attack(times(-1.0)),
    "flipped-x3": Attack(times(-3.0)),
    "half-flipped-x3.9": Attack(flipped(1 / 2, 3.9)),
    "half-flipped-x1.95": Attack(flipped(1 / 2, 1.95)),
    "half-flipped": Attack(flipped(1 / 2, 1.0)),
    "third-flipped-x1.2": Attack(flipped(1 / 3, 1.2)),
    "quarter-flipped-x1.2": Attack(flipped(1 / 4, 1.2)),
    "tenth-flipped-x1.2": Attack(flipped(1 / 10, 1.2)),
    "undo": Attack(undo),
    "hold-8-x15": Attack(times(15.0), every=8),
    "hold-2-x1.5": Attack(times(1.5), every=2),
    "hold-3-half-flipped-x1.5": Attack(flipped(1 / 2, 1.5), every=3),
    "zeros": Attack(times(0.0)),
    "less-the-mean": Attack(less_the_mean),
    "a-little": Attack(a_little),
    "bias": Attack(bias),
}
