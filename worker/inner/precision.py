"""The arithmetic of an inner step: autocast, loss scaling for fp16, TF32, and parameters in bf16.

Each box chooses it for itself: the outer state is fp32 everywhere, so boxes of different precision share a run.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

from protocol.spec.model import Base
from worker.errors import BoxError

Precision = Literal["float8", "bf16", "fp16", "tf32", "fp32"]

_AUTOCAST: dict[Precision, torch.dtype | None] = {
    "float8": torch.bfloat16,  # for all but the linear layers of `use_float8`
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": None,
    "fp32": None,
}


def precision_on(
    device: torch.device,
    wanted: Precision | None = None,
    param_dtype: Literal["fp32", "bf16"] = "fp32",
    base: Base = "full",
) -> Precision:
    """Return `wanted`, or the default: bf16 on CUDA, with bf16 parameters and with a frozen model in 4 bits, otherwise
    fp32.

    Raises ValueError if the device does not support it or it conflicts with how parameters are held.
    """
    needs = (
        "--param-dtype bf16" if param_dtype == "bf16" else "a frozen model in 4 bits (nf4)" if base == "nf4" else None
    )
    if needs and wanted not in (None, "bf16") and not (wanted == "float8" and base == "full"):
        raise ValueError(f"{needs} needs --precision bf16, not {wanted}")
    if wanted == "float8" and not has_float8(device):
        raise ValueError(
            f"--precision float8 needs a GPU with matrix products in float8 (NVIDIA Ada, Hopper or newer, AMD MI300 or "
            f"newer), and the device is {device}{_name_of(device)}; use bf16"
        )
    if wanted == "tf32" and device.type != "cuda":
        raise ValueError(f"--precision tf32 needs CUDA, and the device is {device}; use fp32, bf16 or fp16")
    return wanted or ("bf16" if device.type == "cuda" or needs else "fp32")


def has_float8(device: torch.device) -> bool:
    """Return True for a GPU that multiplies matrices in float8."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= ((9, 4) if torch.version.hip else (8, 9))


def _name_of(device: torch.device) -> str:
    return f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""


_FLOAT8_MULTIPLE = 16  # both sides of a matrix in float8 are multiples of it


def use_float8(model: nn.Module, *, emulate: bool = False) -> int:
    """Let the linear layers of `model`, in place, compute their matrix products in float8 (torchao: e4m3 forward, e5m2
    for gradients, each tensor scaled anew). Return the number of layers. Left out are the output embeddings, and layers
    whose sides are no multiples of 16. Parameters stay the same objects, with the same names.

    `emulate`: compute as if, on a device without float8. Raises BoxError if torchao is not installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError as error:
        raise BoxError(
            f"--precision float8 needs {error.name}, which is not installed; run: pip install 'outerstep[float8]'"
        ) from error
    find = getattr(model, "get_output_embeddings", None)
    head, chosen = find() if callable(find) else None, 0

    def suits(layer: nn.Module, _: str) -> bool:
        nonlocal chosen
        fits = type(layer) is nn.Linear and not (
            layer.in_features % _FLOAT8_MULTIPLE or layer.out_features % _FLOAT8_MULTIPLE
        )
        chosen += fits and layer is not head
        return fits and layer is not head

    convert_to_float8_training(model, module_filter_fn=suits, config=Float8LinearConfig(emulate=emulate))
    return chosen


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
