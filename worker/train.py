"""The training loop of `outerstep worker`: H inner steps per round; DiLoCo does the rest (arXiv 2311.08105)."""

from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import nn

from worker.data.loader import batches
from worker.data.training_set import TrainingSet
from worker.diloco import DiLoCo
from worker.inner.clipping import clip_gradients
from worker.inner.loss import mean_loss
from worker.inner.schedules import Schedule


def train(
    diloco: DiLoCo,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    data: TrainingSet,
    device: torch.device,
) -> None:
    """Train until the run is over or this worker is asked to stop. `schedule` is of the same `optimizers`."""
    spec = diloco.spec
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    for _, batch in batches(diloco, data, device):
        if diloco.inner_step == 0:
            torch.manual_seed(round_seed(spec.seed, diloco.name, diloco.round))  # a resumed round repeats bit for bit
        schedule.set(diloco.global_step, diloco.warmup_scale)
        loss = mean_loss(model, batch)
        loss.backward()
        clip_gradients(parameters, spec.inner)
        diloco.report_loss(loss)
        for optimizer in optimizers:
            optimizer.step()  # the last one, after the last step of a round: sync, and the next round's parameters
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)


def round_seed(seed: int, worker: str, round_number: int) -> int:
    """Return the seed of one worker's random numbers (dropout, for example) in one round."""
    name = f"{seed}\0{worker}\0{round_number}"
    return int.from_bytes(blake3(name.encode()).digest()[:8], "little") >> 1
