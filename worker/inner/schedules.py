"""The learning rate, keyed to global inner steps."""

import math

import torch

from protocol.spec import RunSpec


def learning_rate(spec: RunSpec, global_step: int) -> float:
    """Return the learning rate: linear warmup, then cosine decay to `final_fraction` of the peak at the run's last
    inner step."""
    inner = spec.inner
    if global_step < inner.warmup_steps:
        return inner.learning_rate * (global_step + 1) / inner.warmup_steps
    decay_steps = max(spec.total_inner_steps - inner.warmup_steps, 1)
    step = min(global_step - inner.warmup_steps, decay_steps)
    cosine = (1 + math.cos(math.pi * step / decay_steps)) / 2
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
