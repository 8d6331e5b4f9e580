"""A model's parameters: the trained ones by name, as the coordinator knows them; the part that is here; the frozen
ones.

Parameters are taken in the order of `named_parameters`, tied ones once, only those with requires_grad. If fully_shard
(FSDP2) has sharded a parameter, a process holds a stretch of its rows. Frozen parameters are never sent, so they must
be the same on all workers.
"""

import sys
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from protocol.fragments import TensorSpec
from protocol.messages import FrozenSummary
from worker.errors import ModelError

_FINE = "supported: fully_shard, DistributedDataParallel, torch.compile"


_AVERAGED = (torch.float32, torch.bfloat16, torch.float16)
_PART = 1 << 20  # elements that are hashed at a time


def own_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that are saved with the model and may change in training, such as the statistics
    of batch normalisation: they are not averaged."""
    kept = model.state_dict().keys()
    return [name for name, each in model.named_buffers() if each.is_floating_point() and name in kept]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by the names that they have without torch.compile, DistributedDataParallel and
    DataParallel around the model or parts of it, so that workers with and without these wrappers can share a run.

    Raises ModelError if two parameters get the same name that way.
    """
    return _parameters(model, trained=True)


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, named as in `trainable_parameters`."""
    return _parameters(model, trained=False)


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's buffers, named as in `trainable_parameters`."""
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
            raise ModelError(f"two parameters are called {plain}, one of them {name} inside its wrapper; rename one")
        found[plain] = parameter
    return found


def _wrapped(model: nn.Module) -> set[str]:
    """Return the paths of the modules that are inside a wrapper."""
    return {path for name, module in model.named_modules() if (path := _path_within(name, module))}


def _path_within(name: str, module: nn.Module) -> str | None:
    """Return the path of the module inside `module`, whose name is `name`; None if it wraps none."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        child = "module"
    elif _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule"):
        child = "_orig_mod"
    else:
        return None
    return f"{name}.{child}".removeprefix(".")


def _is_a(value: object, module: str, name: str) -> bool:
    """Return True if `value` is of that class, whose module is slow to import: without the import, nothing is."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _without(within: set[str], name: str) -> str:
    """Return the parameter's name without the parts of its path that come from wrappers."""
    paths = accumulate(name.split("."), "{}.{}".format)
    return ".".join(path.rpartition(".")[2] for path in paths if path not in within)


def tensor_specs(model: nn.Module) -> list[TensorSpec]:
    """Return the model's tensors as the coordinator needs them. Raises ModelError for parameters that cannot be
    averaged."""
    if any(_is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel") for module in model.modules()):
        raise ModelError(f"the model is within FullyShardedDataParallel, which hides its parameters; {_FINE}")
    parameters = trainable_parameters(model)
    if not parameters:
        raise ModelError("the model has no trainable parameters")
    for name, parameter in parameters.items():
        if getattr(parameter, "_is_flat_param", False):
            raise ModelError(f"parameter {name} is flattened (a FlatParameter), which has no shape of its own; {_FINE}")
        if parameter.dtype not in _AVERAGED:
            raise ModelError(
                f"parameter {name} is {parameter.dtype}. Parameters are averaged in float32, so trained ones must be "
                "float32, bfloat16 or float16: call model.float() before the optimizer is made"
            )
    return [TensorSpec(name=name, shape=list(parameter.shape)) for name, parameter in parameters.items()]


def is_sharded(parameter: Tensor) -> bool:
    """Return True if the parameter is a DTensor."""
    return _is_a(parameter, "torch.distributed.tensor", "DTensor")


def reshard(model: nn.Module) -> None:
    """Let modules wrapped by fully_shard drop the parameters that they have gathered: otherwise they would continue
    with those, whatever is written to the parameters."""
    for module in model.modules():
        if _is_a(module, "torch.distributed.fsdp", "FSDPModule"):
            sharded: Any = module
            sharded.reshard()


def local_part(parameter: Tensor) -> Tensor:
    """Return the part of the parameter that is here, sharing its memory."""
    if is_sharded(parameter):
        sharded: Any = parameter.detach()
        local: Tensor = sharded.to_local()
        return local
    return parameter.detach()


def held(name: str, parameter: Tensor) -> tuple[int, int]:
    """Return the stretch [first, last) of the flattened parameter that is here. Raises ModelError if it is not
    contiguous."""
    if not is_sharded(parameter):
        return 0, parameter.numel()
    sharded: Any = parameter
    rows, first, last = len(parameter) if parameter.ndim else 1, 0, parameter.shape[0] if parameter.ndim else 1
    for dimension, placement in enumerate(sharded.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard" or placement.dim != 0 or (first, last) != (0, rows):
            raise ModelError(
                f"parameter {name} is sharded as {placement}, by {sharded.placements}: only its rows can be "
                f"sharded, once, as fully_shard does by default; {_FINE}"
            )
        parts, here = sharded.device_mesh.size(dimension), sharded.device_mesh.get_local_rank(dimension)
        chunk = -(-rows // parts)
        first, last = min(here * chunk, rows), min((here + 1) * chunk, rows)
    width = parameter.numel() // rows if rows else 0
    local = sharded.to_local().numel()
    if local != (last - first) * width:
        raise ModelError(f"parameter {name} has {local} elements here, not the {(last - first) * width} of its shard")
    return first * width, last * width


def frozen_summary(model: nn.Module) -> FrozenSummary | None:
    """Return the digest and size of the parameters that are not trained (`summary_of`); None if all are trained."""
    frozen = frozen_parameters(model)
    if not any(each.numel() for each in frozen.values()):
        return None
    return summary_of((name, _whole(each)) for name, each in frozen.items())


def _whole(parameter: Tensor) -> Tensor:
    sharded: Any = parameter
    # One after the other, in all processes of the worker.
    whole: Tensor = sharded.full_tensor() if is_sharded(parameter) else parameter.detach()
    return whole


def summary_of(frozen: Iterable[tuple[str, Tensor]]) -> FrozenSummary:
    """Return the digest and size of frozen parameters, given with their names.

    The digest is BLAKE3 of each parameter's name, 0, its shape as `2,3`, 0, and its values, in the model's order.
    Values are little-endian fp32, so the digest is the same if a worker holds weights in bf16 that were bf16
    originally. Integers stay as they are.
    """
    hasher, elements = blake3(max_threads=blake3.AUTO), 0
    for name, whole in frozen:
        hasher.update(f"{name}\0{','.join(map(str, whole.shape))}\0".encode())
        for part in whole.contiguous().view(-1).split(_PART):
            values = (part.float() if part.is_floating_point() else part).cpu().numpy()
            if sys.byteorder == "big":
                values = values.byteswap()
            hasher.update(values.view("u1").data)
        elements += whole.numel()
    return FrozenSummary(digest=hasher.hexdigest(), elements=elements)
