"""What a script hands in to train with: its optimizers, without their wrappers, and whether they train the model.

All of this is found out before the run is joined: afterwards the script would train on, and nothing of it be sent.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from worker.errors import ModelError
from worker.state.fragments import trainable_parameters

log = logging.getLogger(__name__)


def usable_optimizers(model: nn.Module, given: Any) -> list[Optimizer]:
    """Return the optimizers in `given`, one or a sequence, in order; of accelerate's and Lightning's wrappers what they
    wrap, whose steps are the real ones.

    Raises TypeError and ValueError for what is no optimizer, ModelError for one that trains something else.
    """
    optimizers = [_unwrapped(each) for each in (given if isinstance(given, Sequence) else [given])]
    if not optimizers:
        raise ValueError("inner_optimizer is an empty sequence: DiLoCo needs one optimizer at least")
    if len({id(each) for each in optimizers}) < len(optimizers):
        raise ValueError("inner_optimizer has one optimizer twice: give each once, in the order in which they step")
    _check_that_they_train(model, optimizers)
    return optimizers


def _unwrapped(given: Any) -> Optimizer:
    while isinstance(inner := getattr(given, "optimizer", None), Optimizer):
        given = inner
    if not isinstance(given, Optimizer):
        raise TypeError(
            f"inner_optimizer is of type {type(given).__name__}, which is no torch.optim.Optimizer, nor wraps one as "
            "its `optimizer`: give the optimizer whose step() moves the parameters"
        )
    return given


def _check_that_they_train(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        groups = optimizer.param_groups
        foreign = [each for group in groups for each in group["params"] if each.requires_grad and id(each) not in own]
        kind = type(optimizer).__name__
        if foreign and len(foreign) == sum(each.requires_grad for group in groups for each in group["params"]):
            raise ModelError(
                f"{kind} trains none of the model's parameters: it was made for another model, holds copies of them, "
                "or they were replaced since; make it from this model's parameters()"
            )
        if foreign:
            raise ModelError(
                f"{kind} also trains {len(foreign)} parameters that are not the model's, the first of shape "
                f"{list(foreign[0].shape)}: no other worker would get them; make them part of the model"
            )
    stepped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    left = [name for name, parameter in trainable_parameters(model).items() if id(parameter) not in stepped]
    if left:
        log.warning(
            "%d trainable parameters are in no optimizer, such as %s: they are sent in every round and never change; "
            "requires_grad_(False) leaves them out",
            len(left),
            left[0],
        )


class Parameters:
    """The model's parameters as they were when the run was joined.

    stepped   one of the run's optimizers has stepped since `begin_unit`, be it that a GradScaler had it do nothing
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._found = model, self._now(model)
        self._all = list(trainable_parameters(model).values())
        self.stepped, self._before = False, 0

    @staticmethod
    def _now(model: nn.Module) -> dict[str, tuple[int, torch.dtype, torch.device]]:
        return {name: (id(each), each.dtype, each.device) for name, each in trainable_parameters(model).items()}

    def begin_unit(self) -> None:
        """Note how often they were written to."""
        self.stepped, self._before = False, self._writes()

    def end_unit(self) -> None:
        """Raise ModelError where somebody else than the run's optimizers has trained them since `begin_unit`."""
        if not self.stepped and self._writes() != self._before:
            raise ModelError(
                "the model's parameters changed without a step of the optimizer that DiLoCo was given: another one "
                "steps, whose steps are neither counted nor followed by a sync; give DiLoCo that one"
            )

    def _writes(self) -> int:
        return sum(each._version for each in self._all)  # noqa: SLF001, which autograd's documentation names

    def check(self) -> None:
        """Raise ModelError where they are not the same any more: what was sent would not be what is trained."""
        now = self._now(self._model)
        if now == self._found:
            return
        name = next(name for name in self._found | now if self._found.get(name) != now.get(name))
        raise ModelError(
            f"the model's parameters were changed after the run was joined, {name} for one: replaced, frozen, or put "
            "into another dtype or onto another device; do that before DiLoCo is made"
        )
