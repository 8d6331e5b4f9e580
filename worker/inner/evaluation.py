"""The held-out loss."""

import torch
from torch import nn

from protocol.messages import EvaluationReport
from worker.data.text import TextData
from worker.inner.loss import mean_loss


@torch.no_grad()
def evaluate(model: nn.Module, data: TextData, max_tokens: int, device: torch.device) -> EvaluationReport:
    """Return the held-out loss, mean nats per token, over at most `max_tokens` held-out tokens."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for batch in data.held_out_batches(max_tokens):
        count = batch[:, 1:].numel()
        total += float(mean_loss(model, batch.to(device))) * count
        tokens += count
    model.train(was_training)
    size = round(tokens * data.bytes_per_token)
    return EvaluationReport(loss=total / tokens, tokens=tokens, bytes=size)
