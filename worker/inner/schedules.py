"""The learning rate as a function of the global inner step: linear warmup, then the run's schedule."""

import math
from collections.abc import Callable, Sequence

import torch

from protocol.spec.run import RunSpec


def _cosine(step: int, steps: int, decay: int) -> float:
    return (1 + math.cos(math.pi * step / steps)) / 2


def _wsd(step: int, steps: int, decay: int) -> float:
    return min((steps - step) / min(decay, steps), 1.0)


def _linear(step: int, steps: int, decay: int) -> float:
    return (steps - step) / steps


def _constant(step: int, steps: int, decay: int) -> float:
    return 1.0


# inner.schedule -> the factor at `step` of the `steps` after the warmup: 1 at the end of the warmup, 0 at the end of
# the run (constant: 1). Only wsd uses `decay`, the number of final steps that decay (Hägele et al., arXiv 2405.18392).
SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "linear": _linear,
    "constant": _constant,
}


def learning_rate(spec: RunSpec, global_step: int, peak: float) -> float:
    """Return the learning rate of a parameter group whose peak rate is `peak`: linear warmup, then the run's schedule,
    down to `final_fraction` of the peak at the run's last inner step."""
    inner = spec.inner
    if global_step < inner.warmup_steps:
        return peak * (global_step + 1) / inner.warmup_steps
    steps = max(spec.total_inner_steps - inner.warmup_steps, 1)
    step = min(global_step - inner.warmup_steps, steps)
    decay = max(round(inner.decay_fraction * spec.total_inner_steps), 1)
    height = SCHEDULES[inner.schedule](step, steps, decay)
    return peak * (inner.final_fraction + (1 - inner.final_fraction) * height)


class Schedule:
    """Sets the learning rates of the inner optimizers: each group's peak rate, scaled by the run's schedule.

    The peaks are the groups' rates at construction. (A snapshot loaded later changes the groups' rates.)
    """

    def __init__(self, spec: RunSpec, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._spec, self._optimizers = spec, optimizers
        self._peaks = [[float(group["lr"]) for group in each.param_groups] for each in optimizers]

    def set(self, global_step: int, scale: float = 1.0) -> None:
        """Set the rates of inner step `global_step`, times `scale`."""
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = learning_rate(self._spec, global_step, peak) * scale
