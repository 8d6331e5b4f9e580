"""The held-out loss."""

import math

import torch
from torch import Tensor, nn

from protocol.messages import EvaluationReport
from worker.data.training_set import TrainingSet
from worker.errors import ModelError
from worker.inner.loss import Loss
from worker.inner.micro_batch import MicroBatches


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: TrainingSet,
    max_tokens: int,
    device: torch.device,
    loss: Loss | None = None,
    micro_batches: MicroBatches | None = None,
) -> EvaluationReport:
    """Return the held-out loss, mean nats per token, over at most `max_tokens` held-out tokens.

    loss           the model's; None: in the device's default precision
    micro_batches  None: whole batches

    Raises ModelError if the loss is not finite.
    """
    loss = loss or Loss(model)

    def sum_of(parts: tuple[Tensor, ...]) -> float:
        return sum(float(loss(part)) * int(loss.targets(part)) for part in parts)

    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    # Eagerly even if the model is compiled: evaluations are rare and have other shapes, so compiling does not pay.
    with torch.compiler.set_stance("force_eager"):
        for batch in data.held_out_batches(max_tokens):
            on_device = batch.to(device)
            sizes = micro_batches or MicroBatches(len(batch), len(batch))
            total += sizes.over(on_device, sum_of)
            tokens += int(loss.targets(batch))
    model.train(was_training)
    if not math.isfinite(total):
        raise ModelError(f"the held-out loss is {total}: the model's parameters are not finite, or far too large")
    # Without bytes per token (the tokens are not text), bits per byte are unknown.
    size = round(tokens * (data.bytes_per_token or 0)) or None
    return EvaluationReport(loss=total / tokens, tokens=tokens, bytes=size)
