"""The arithmetic of an inner step: autocast, loss scaling for fp16, TF32, and parameters in bf16.

Each box chooses it for itself: the outer state is fp32 everywhere, so boxes of different precision share a run.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

from protocol.spec.model import Base

Precision = Literal["bf16", "fp16", "tf32", "fp32"]

_AUTOCAST: dict[Precision, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": None,
    "fp32": None,
}


def precision_on(
    device: torch.device,
    wanted: Precision | None = None,
    parameters: Literal["fp32", "bf16"] = "fp32",
    base: Base = "full",
) -> Precision:
    """Return `wanted`, or the default: bf16 on CUDA, with bf16 parameters and with a frozen model in 4 bits, otherwise
    fp32.

    Raises ValueError if the device does not support it or it conflicts with how parameters are held.
    """
    needs = "--parameters bf16" if parameters == "bf16" else "a frozen model in 4 bits (nf4)" if base == "nf4" else None
    if needs and wanted not in (None, "bf16"):
        raise ValueError(f"{needs} needs --precision bf16, not {wanted}")
    if wanted == "tf32" and device.type != "cuda":
        raise ValueError(f"--precision tf32 needs CUDA, and the device is {device}; use fp32, bf16 or fp16")
    return wanted or ("bf16" if device.type == "cuda" or needs else "fp32")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context manager for a forward pass."""
    dtype = _AUTOCAST[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the loss scaler that fp16 needs against vanishing gradients; None for other precisions."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def allow_tf32(precision: Precision) -> None:
    """Compute fp32 matrix products in TF32 in this process, if `precision` is tf32. The sync contains no matrix
    product, so its bits do not change."""
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")


def cast_parameters(model: nn.Module, to: torch.dtype) -> None:
    """Cast the parameters in place, but no buffers: rotary embedding tables lose too much in bf16. Quantised parameters
    stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(to)
