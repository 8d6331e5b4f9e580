"""The inner optimizer."""

import torch
from torch import nn

from protocol.spec import InnerSpec


def build_inner_optimizer(model: nn.Module, inner: InnerSpec) -> torch.optim.AdamW:
    """Return AdamW on the trainable parameters; fused, which torch offers for CPU, CUDA and MPS."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters,
        lr=inner.learning_rate,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
        fused=True,
    )
