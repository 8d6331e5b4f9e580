"""The parameters that a worker does not train: nobody sends them, so they must be the same on all workers."""

import sys
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from protocol.messages import FrozenSummary
from worker.state.parameters import frozen_parameters, is_sharded


@torch.no_grad()
def frozen_summary(model: nn.Module) -> FrozenSummary | None:
    """Return the identity of the parameters that are not trained; None if all are.

    The digest is BLAKE3 of each parameter's name, 0, its shape as `2,3`, 0, and its values, in the model's order.
    Values are little-endian fp32: so it is the same where a worker holds in bf16 what was bf16 to begin with. Integers
    are as they are.
    """
    hasher, elements = blake3(max_threads=blake3.AUTO), 0
    for name, parameter in frozen_parameters(model).items():
        whole: Any = parameter
        if is_sharded(parameter):  # one after the other, in all processes of the worker
            whole = whole.full_tensor()
        values = (whole.float() if whole.is_floating_point() else whole).contiguous().cpu().numpy()
        if sys.byteorder == "big":
            values = values.byteswap()
        hasher.update(f"{name}\0{','.join(map(str, values.shape))}\0".encode())
        hasher.update(values.reshape(-1).view("u1").data)
        elements += parameter.numel()
    return FrozenSummary(digest=hasher.hexdigest(), elements=elements) if elements else None
