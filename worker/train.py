"""The training loop of `outerstep worker`: H inner steps per round; DiLoCo does the rest (arXiv 2311.08105)."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from worker.accounts.step_log import StepLog
from worker.box import Box
from worker.data.loader import batches
from worker.rounds.training import round_seed


class StepSource(Protocol):
    """Counts the inner steps and supplies the units: a DiLoCo, or a worker that trains alone."""

    @property
    def name(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def inner_step(self) -> int: ...
    @property
    def global_step(self) -> int: ...
    @property
    def warmup_scale(self) -> float: ...
    def units(self) -> Iterator[int]: ...
    def upcoming(self) -> Iterator[int]: ...
    def report_loss(self, loss: Tensor) -> None: ...


def train(steps: StepSource, box: Box, log: StepLog | None = None) -> None:
    """Train until the run is over or this worker is asked to stop; write each inner step to `log`."""
    spec, ranks = box.spec, box.ranks
    box.model.train()
    for unit, batch in batches(steps, box.data, box.device):
        if steps.inner_step == 0:
            torch.manual_seed(
                round_seed(spec.seed, steps.name, steps.round, ranks.rank)
            )  # makes a resumed round repeat bit for bit
            if log is not None:
                log.begin_round()
        box.schedule.set(steps.global_step, steps.warmup_scale)
        loss = box.step.gradient(batch[ranks.rank :: ranks.size], box.step.targets(batch) / ranks.size)
        steps.report_loss(loss)
        if box.logs:
            loss = ranks.mean(loss)
        if log is not None:
            log.step(
                loss,
                spec.unit_tokens,
                step=steps.global_step,
                round=steps.round,
                inner_step=steps.inner_step,
                unit=unit,
                learning_rate=box.optimizers[-1].param_groups[0]["lr"],  # AdamW's, if Muon steps before it
            )
        box.step.apply()  # after the last step of a round: the sync, and the next round's parameters
