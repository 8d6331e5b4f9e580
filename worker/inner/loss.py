"""The loss of one batch."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.models.building import logits_of


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy, nats per token, of int64[batch, length + 1]; in bf16 autocast on CUDA."""
    with _autocast(batch.device):
        logits = logits_of(model, batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
