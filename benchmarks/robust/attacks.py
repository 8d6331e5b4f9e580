"""What hostile and broken workers send in place of their honest pseudo-gradients."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ONCE, ONCE_ONLY = 4, "x100-once"  # the round of the attack that comes once

# What all would send if they were honest, the hostile ones first, float32[workers, n]; how many those are; randomness
# -> what they send, float32[hostile, n].
Attack = Callable[[Tensor, int, np.random.Generator], Tensor]


def times(factor: float) -> Attack:
    return lambda honest, hostile, draw: honest[:hostile] * factor


def noise(factor: float) -> Attack:
    def sent(honest: Tensor, hostile: int, draw: np.random.Generator) -> Tensor:
        values = torch.from_numpy(draw.standard_normal((hostile, honest.shape[1])).astype(np.float32))
        return values * (factor * honest[:hostile].norm(dim=1, keepdim=True) / values.norm(dim=1, keepdim=True))

    return sent


def less_the_mean(honest: Tensor, hostile: int, draw: np.random.Generator) -> Tensor:
    return (-0.5 * honest[hostile:].mean(0)).expand(hostile, -1)


def a_little(honest: Tensor, hostile: int, draw: np.random.Generator) -> Tensor:
    others = honest[hostile:]
    return (others.mean(0) - others.std(0)).expand(hostile, -1)


def bias(honest: Tensor, hostile: int, draw: np.random.Generator) -> Tensor:
    direction = torch.from_numpy(draw.standard_normal(honest.shape[1]).astype(np.float32))
    return honest[:hostile] + 0.5 * honest.norm(dim=1).mean() * direction / direction.norm()


ATTACKS: dict[str, Attack] = {
    "x1e6": times(1e6),
    ONCE_ONLY: times(100.0),
    "x10": times(10.0),
    "noise-x10": noise(10.0),
    "flipped": times(-1.0),
    "flipped-x3": times(-3.0),
    "zeros": times(0.0),
    "noise": noise(1.0),
    "less-the-mean": less_the_mean,
    "a-little": a_little,
    "bias": bias,
}
AWAY = "away"  # the hostile ones send nothing at all
