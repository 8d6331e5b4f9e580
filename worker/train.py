"""The training loop of `outerstep worker`: H inner steps per round; DiLoCo does the rest (arXiv 2311.08105)."""

import torch

from worker.accounts.step_log import StepLog
from worker.box import Box
from worker.data.loader import batches
from worker.diloco import DiLoCo


def train(diloco: DiLoCo, box: Box, log: StepLog | None = None) -> None:
    """Train until the run is over or this worker is asked to stop; write each inner step to `log`."""
    spec, ranks = box.spec, box.ranks
    box.model.train()
    for unit, batch in batches(diloco, box.data, box.device):
        if diloco.inner_step == 0:
            torch.manual_seed(diloco.data_seed)  # a resumed round repeats bit for bit
            if log is not None:
                log.begin_round()
        box.schedule.set(diloco.global_step, diloco.warmup_scale)
        loss = box.step.gradient(batch[ranks.rank :: ranks.size], box.step.targets(batch) / ranks.size)
        diloco.report_loss(loss)
        if box.logs:
            loss = ranks.mean(loss)
        if log is not None:
            log.step(
                loss,
                spec.unit_tokens,
                step=diloco.global_step,
                round=diloco.round,
                inner_step=diloco.inner_step,
                unit=unit,
                learning_rate=box.optimizers[-1].param_groups[0]["lr"],  # AdamW's, if Muon steps before it
            )
        box.step.apply()  # after the last step of a round: the sync, and the next round's parameters
