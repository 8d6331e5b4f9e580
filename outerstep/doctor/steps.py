"""A few inner steps of a box that is set up, and what they show: the time of a step and of a round."""

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from outerstep.common.quantities import bytes_text, count_text, duration_text, share_text
from protocol.spec.run import RunSpec
from worker.box import Box

MOST_STEPS, ENOUGH_S = 5, 20.0  # inner steps after the first; none if the first alone took this long


@dataclass(frozen=True)
class Steps:
    """Measurements of a few inner steps. The first one includes one-time costs, such as compiling and allocating the
    optimizer's memory. `at_once`: the final micro-batch."""

    first_s: float
    step_s: float
    peak_bytes: int | None
    at_once: int
    mfu: float | None


def take_steps(box: Box, *, clock: Callable[[], float] = time.monotonic) -> Steps:
    """Take a few inner steps as a worker would. Raises what a worker would raise."""
    ranks = box.ranks
    batch = box.data.unit(0)[ranks.rank :: ranks.size].to(box.device)
    box.model.train()
    box.schedule.set(0)
    first_s = _step_s(box, batch, clock)
    spent_s = 0.0 if box.settings.compile else first_s  # compiling takes minutes, but only in the first step
    took: list[float] = []
    while len(took) < MOST_STEPS and ranks.on_first(partial(operator.lt, spent_s, ENOUGH_S)):
        took.append(_step_s(box, batch, clock))
        spent_s += took[-1]
    step_s = median(took or [first_s])
    return Steps(
        first_s=first_s,
        step_s=step_s,
        peak_bytes=box.use.peak_memory_bytes(),
        at_once=min(box.micro_batches.size, len(batch)),
        mfu=box.use.utilisation(box.spec.unit_tokens / step_s) if step_s else None,
    )


def _step_s(box: Box, batch: Tensor, clock: Callable[[], float]) -> float:
    begun = clock()
    box.step.gradient(batch)
    box.step.apply()
    if box.device.type != "cpu":
        torch.accelerator.synchronize()
    return clock() - begun


def in_words(seen: Steps, spec: RunSpec, processes: int = 1) -> str:
    rate = f"{count_text(spec.unit_tokens / seen.step_s)} tokens/s" if seen.step_s else "too fast to measure"
    used = f", {share_text(seen.mfu)} of the peak (MFU)" if seen.mfu is not None else ""
    peak = f", peak memory {bytes_text(seen.peak_bytes)}" if seen.peak_bytes is not None else ""
    each = " of each process" if processes > 1 else ""
    sync = spec.sync
    whose = " on the fastest worker, and are fewer on others" if sync.wait == "never" else ""
    return (
        f"{short_duration(seen.step_s)} for {spec.unit_tokens} tokens, {seen.at_once} sequences at once: {rate}{used}"
        f"{peak}{each}; the first step {short_duration(seen.first_s)}. A round's {sync.inner_steps} take "
        f"{short_duration(sync.inner_steps * seen.step_s)}{whose}"
    )


def short_duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration_text(seconds)
