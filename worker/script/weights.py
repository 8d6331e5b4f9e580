"""Other weights in a model for a while, such as an average of them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from worker.state.parameters import frozen_parameters, named_buffers, trainable_parameters

Weights = nn.Module | Mapping[str, Tensor] | Iterable[Tensor]


@contextmanager
def lent(model: nn.Module, given: Weights) -> Iterator[None]:
    """Have `model` hold the values `given` within the block, and its own again at its end. Raises ValueError where they
    are not those of its trainable parameters."""
    values = _by_name(model, given)
    own: dict[str, Tensor] = trainable_parameters(model) | named_buffers(model)
    for name, value in values.items():
        if name in own and own[name].shape != value.shape:
            raise ValueError(
                f"{name} is of shape {[*value.shape]} among the weights, {[*own[name].shape]} in the model"
            )
    kept = {name: tensor.detach().clone() for name, tensor in own.items() if name in values}
    try:
        _write(own, {name: values[name] for name in kept})
        yield
    finally:
        _write(own, kept)


@torch.no_grad()
def _write(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        own[name].copy_(value)


def _by_name(model: nn.Module, given: Weights) -> dict[str, Tensor]:
    names = trainable_parameters(model).keys()
    if isinstance(given, AveragedModel):
        given = given.module
    if isinstance(given, nn.Module):
        found: dict[str, Tensor] = trainable_parameters(given) | frozen_parameters(given) | named_buffers(given)
    elif isinstance(given, Mapping):
        found = dict(given)
    else:
        tensors = list(given)
        if len(tensors) != len(names):
            raise ValueError(f"{len(tensors)} tensors were given, and the model has {len(names)} trainable parameters")
        found = dict(zip(names, tensors, strict=True))
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the weights lack {missing[0]}, and {len(missing) - 1} more of the model's parameters")
    return found
