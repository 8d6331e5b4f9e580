"""A model's trainable parameters: by name, as the coordinator is told of them, and which part of each is here.

Parameters are taken in `named_parameters` order, tied ones once, those with requires_grad only. Of a parameter that
fully_shard (FSDP2) has sharded, a process holds a stretch of its rows.

The parameters that a worker does not train: nobody sends them, so they must be the same on all workers.
"""

import sys
from itertools import accumulate
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from protocol.fragments import TensorSpec
from protocol.messages import FrozenSummary
from worker.errors import ModelError

_FINE = "what is fine: fully_shard, DistributedDataParallel, torch.compile"


def own_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that would be saved with the model and that may change as it trains, such as the
    statistics of a batch normalisation: they are not averaged."""
    kept = model.state_dict().keys()
    return [name for name, each in model.named_buffers() if each.is_floating_point() and name in kept]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by the names that they have without torch.compile, DistributedDataParallel and
    DataParallel around the model or parts of it, so that workers with and without them share a run.

    Raises ModelError where two parameters then have one name.
    """
    return _parameters(model, trained=True)


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, otherwise like `trainable_parameters`."""
    return _parameters(model, trained=False)


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's buffers, by names like those of `trainable_parameters`."""
    within = _wrapped(model)
    return {_without(within, name): buffer for name, buffer in model.named_buffers()}


def _parameters(model: nn.Module, *, trained: bool) -> dict[str, nn.Parameter]:
    within = _wrapped(model)
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is not trained:
            continue
        plain = _without(within, name)
        if plain in found:
            raise ModelError(f"two parameters are called {plain}, one of them {name} within its wrapper; rename one")
        found[plain] = parameter
    return found


def _wrapped(model: nn.Module) -> set[str]:
    """The paths of the modules that others wrap."""
    return {path for name, module in model.named_modules() if (path := _path_within(name, module))}


def _path_within(name: str, module: nn.Module) -> str | None:
    """The path of the module that `module`, of this name, wraps; None where it wraps none."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        child = "module"
    elif _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule"):
        child = "_orig_mod"
    else:
        return None
    return f"{name}.{child}".removeprefix(".")


def _is_a(value: object, module: str, name: str) -> bool:
    """Return True if `value` is of that class, whose module takes seconds to import: until it is, nothing is."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _without(within: set[str], name: str) -> str:
    """The parameter's name less the parts of its path that only a wrapper has put there."""
    paths = accumulate(name.split("."), "{}.{}".format)
    return ".".join(path.rpartition(".")[2] for path in paths if path not in within)


def tensor_specs(model: nn.Module) -> list[TensorSpec]:
    """What the coordinator is told about the model. Raises ModelError for parameters that cannot be averaged here."""
    if any(_is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel") for module in model.modules()):
        raise ModelError(f"the model is within FullyShardedDataParallel, which hides its parameters; {_FINE}")
    parameters = trainable_parameters(model)
    if not parameters:
        raise ModelError("the model has no trainable parameters")
    for name, parameter in parameters.items():
        if getattr(parameter, "_is_flat_param", False):
            raise ModelError(f"parameter {name} is flattened (a FlatParameter), which has no shape of its own; {_FINE}")
        if not parameter.is_floating_point():
            raise ModelError(f"parameter {name} is {parameter.dtype}; only floating-point parameters can be averaged")
    return [TensorSpec(name=name, shape=list(parameter.shape)) for name, parameter in parameters.items()]


def is_sharded(parameter: Tensor) -> bool:
    """Return True if the parameter is a DTensor, whatever part of it is here."""
    return _is_a(parameter, "torch.distributed.tensor", "DTensor")


def reshard(model: nn.Module) -> None:
    """Have the modules that fully_shard has wrapped drop what they gathered of others' parts: otherwise they would go
    on with it, whatever is written to the parameters."""
    for module in model.modules():
        if _is_a(module, "torch.distributed.fsdp", "FSDPModule"):
            sharded: Any = module
            sharded.reshard()


def local_part(parameter: Tensor) -> Tensor:
    """Return what of the parameter is here, as a tensor that shares its memory."""
    if is_sharded(parameter):
        sharded: Any = parameter.detach()
        local: Tensor = sharded.to_local()
        return local
    return parameter.detach()


def held(name: str, parameter: Tensor) -> tuple[int, int]:
    """Return from where to where the flattened parameter is here. Raises ModelError where that is no stretch of it."""
    if not is_sharded(parameter):
        return 0, parameter.numel()
    sharded: Any = parameter
    rows, first, last = len(parameter) if parameter.ndim else 1, 0, parameter.shape[0] if parameter.ndim else 1
    for dimension, placement in enumerate(sharded.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard" or placement.dim != 0 or (first, last) != (0, rows):
            raise ModelError(
                f"parameter {name} is sharded as {placement}, and here as a whole by {sharded.placements}: only its "
                f"rows can be, once, as fully_shard does by itself; {_FINE}"
            )
        parts, here = sharded.device_mesh.size(dimension), sharded.device_mesh.get_local_rank(dimension)
        chunk = -(-rows // parts)
        first, last = min(here * chunk, rows), min((here + 1) * chunk, rows)
    width = parameter.numel() // rows if rows else 0
    local = sharded.to_local().numel()
    if local != (last - first) * width:
        raise ModelError(f"parameter {name} has {local} elements here, not the {(last - first) * width} of its shard")
    return first * width, last * width


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
