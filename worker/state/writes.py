"""Detects foreign writes: anything but the run's optimizers that writes to the model's parameters would be sent as
training.

PyTorch counts writes in `Tensor._version`, but not those of fused optimizers, `parameter.data.copy_(…)` or
`parameter.data = …`. So before each inner step, up to 64 elements of every parameter are compared bit for bit with what
the last step left: that takes microseconds, however large the model is. On a GPU, the result is read at once if version
or memory have changed, and otherwise before anything is sent, so that no step waits for the device.

Other weights, such as an average, may be in the model for a while with `temporary_weights`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from worker.errors import ModelError
from worker.state.optimizer_state import is_schedule_free
from worker.state.parameters import frozen_parameters, is_sharded, local_part, named_buffers, trainable_parameters

_SAMPLED = 64  # elements of a parameter
_PATIENCE = 2  # changes that loss reports may show between two inner steps: SAM has one

_Kind = tuple[torch.device, torch.dtype]
_Samples = dict[_Kind, Tensor]


class ForeignWrites:
    """Watches the trainable parameters of `model`, except those of schedule-free optimizers, which move them between
    their points. Only `optimizers` may write to the others."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        self._optimizers = {id(each) for each in optimizers}
        named = trainable_parameters(model)
        self._names = {id(parameter): name for name, parameter in named.items()}
        moving = {
            id(parameter)
            for each in optimizers
            if is_schedule_free(each)
            for group in each.param_groups
            for parameter in group["params"]
        }
        self._named = {
            name: each for name, each in named.items() if id(each) not in moving and _is_plain(local_part(each))
        }
        self._sharded = [is_sharded(each) for each in self._named.values()]
        self._begun: dict[int, int] = {}  # other optimizers that are stepping, and the number of the run's steps before
        self._steps, self._stepping = 0, False
        self._doubts: _Samples = {}  # the result of `_compared` before a step that did not wait for it
        self._changes = 0  # seen by loss reports, since the last step
        self.borrowed = False  # the script has put other values into the model for a while
        self._see()
        self.remember()

    # --- inner steps ----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """One of the run's optimizers is about to step. Raises ModelError for a foreign write since the last step (on a
        GPU perhaps later), and RuntimeError while other weights are in the model."""
        if self.borrowed:
            raise RuntimeError(
                "an inner optimizer steps within `with diloco.weights(…):`, which restores the model's own "
                "weights at its end: train outside of it"
            )
        self._stepping = True
        found = self._compared()
        if self._waits_for_nothing or self._places() != self._at:
            self._refuse(self._named_in(found))
        else:
            self._doubts = found

    def after_step(self) -> None:
        """One of the run's optimizers has stepped."""
        self._stepping, self._changes = False, 0
        self._steps += 1
        self.remember()

    def remember(self) -> None:
        """Accept what the model holds now, as after a sync."""
        places = self._places()
        if [pointer for _, pointer in places] != self._pointers:
            self._see()
        self._at = self._losses_by_round = places
        self._known = self._sample()

    def remember_if_written(self) -> None:
        """Call `remember` if anything was written since."""
        if any(self._sharded) or self._places() != self._at:
            self.remember()

    def check(self) -> None:
        """Raise ModelError for a foreign write."""
        self._refuse(self.changed())

    def check_pending(self) -> None:
        """Raise ModelError for a foreign write before an inner step that did not wait for the device."""
        self._refuse(self._named_in(self._doubts))

    def _refuse(self, name: str | None) -> None:
        if name is not None:
            raise ModelError(
                f"the model's parameters, {name} for one, changed without a step of the optimizer that DiLoCo was "
                "given: by a checkpoint loaded after the run was joined, EMA weights that were swapped in and not "
                "out again, an optimizer that DiLoCo was not given, or the loop itself. The workers' models would "
                "no longer match. Load checkpoints before DiLoCo is made, evaluate other weights within `with "
                "diloco.weights(ema):`, and clamp weights in optimizer.register_step_post_hook(…), set before "
                "`with`"
            )

    def changed(self) -> str | None:
        """Return the name of a parameter with a foreign write, None if there is none. Waits for the device."""
        return self._named_in(self._compared())

    def _named_in(self, found: _Samples) -> str | None:
        for kind, differs in found.items():
            if bool(differs.any()):
                lengths = [length for _, length in self._lengths[kind]]
                parts = zip(self._lengths[kind], differs.split(lengths), strict=True)
                return next(name for (name, _), part in parts if bool(part.any()))
        return None

    # --- between steps --------------------------------------------------------------------------------------------

    def check_between_steps(self) -> None:
        """A loss is reported. Raises ModelError if the parameters keep changing without a step."""
        places = self._places()
        if places == self._losses_by_round:
            return
        self._losses_by_round, self._changes = places, self._changes + 1
        if self._changes >= _PATIENCE:
            self.check()

    # --- other optimizers -----------------------------------------------------------------------------------------

    def before_other(self, optimizer: Optimizer, *_: Any) -> None:
        """Any optimizer of this process begins a step."""
        if id(optimizer) not in self._optimizers:
            self._begun[id(optimizer)] = self._steps

    def after_other(self, optimizer: Optimizer, *_: Any) -> None:
        """Any optimizer of this process has stepped. Raises ModelError if it trains the model's parameters and is
        neither one of the run's, nor around or inside one."""
        before = self._begun.pop(id(optimizer), None)
        if before is None or self._stepping or self._steps > before:
            return
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        own = next((self._names[id(each)] for each in parameters if id(each) in self._names), None)
        if own is not None:
            raise ModelError(
                f"{type(optimizer).__name__}, an optimizer that DiLoCo was not given, has stepped on the model's "
                f"{own}: its steps are not counted and not followed by a sync, so the workers' models would "
                "diverge; give DiLoCo all optimizers, in the order in which they step"
            )

    # --- samples --------------------------------------------------------------------------------------------------

    def _places(self) -> list[tuple[int, int]]:
        """Return of every parameter the number of writes that PyTorch has counted, and its address."""
        found = []
        for parameter, sharded in zip(self._named.values(), self._sharded, strict=True):
            local = local_part(parameter) if sharded else parameter
            found.append((local._version, local.data_ptr()))  # noqa: SLF001, documented with autograd
        return found

    def _see(self) -> None:
        """Choose the elements to compare."""
        self._pointers = [pointer for _, pointer in self._places()]
        self._waits_for_nothing = all(local_part(each).device.type == "cpu" for each in self._named.values())
        self._views: dict[_Kind, list[Tensor]] = {}
        self._lengths: dict[_Kind, list[tuple[str, int]]] = {}
        for name, parameter in self._named.items():
            view = _sampled(local_part(parameter))
            if view.numel():
                kind = view.device, view.dtype
                self._views.setdefault(kind, []).append(view)
                self._lengths.setdefault(kind, []).append((name, view.numel()))

    @torch.no_grad()
    def _sample(self) -> _Samples:
        return {
            kind: _bits(torch.cat([view if view.ndim == 1 else view.reshape(-1) for view in views]))
            for kind, views in self._views.items()
        }

    def _compared(self) -> _Samples:
        """Return which elements differ now, or differed before an earlier step: bool[n], on their device. Parameters
        that cannot be compared, with a new dtype or device, are left to `Fragments.check`."""
        if [pointer for _, pointer in self._places()] != self._pointers:
            self._see()
        now = self._sample()
        if now.keys() != self._known.keys():
            return self._doubts
        found = {kind: now[kind] != known for kind, known in self._known.items()}
        return {kind: each | self._doubts[kind] if kind in self._doubts else each for kind, each in found.items()}


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _sampled(tensor: Tensor) -> Tensor:
    """Return a view of some elements, spread over the tensor if its memory has no gaps."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat[:: max(1, -(-len(flat) // _SAMPLED))]
    while tensor.numel() > _SAMPLED and tensor.ndim > 1:
        tensor = tensor.select(0, len(tensor) // 2)
    return tensor[:_SAMPLED] if tensor.ndim == 1 else tensor


def _bits(values: Tensor) -> Tensor:
    """Return the values as integers, so that a NaN equals itself."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


Weights = nn.Module | Mapping[str, Tensor] | Iterable[Tensor]


@contextmanager
def temporary_weights(model: nn.Module, given: Weights) -> Iterator[None]:
    """Let `model` hold the values `given` within the block, and restore its own at the end. Raises ValueError if they
    do not match its trainable parameters."""
    values = _by_name(model, given)
    own: dict[str, Tensor] = trainable_parameters(model) | named_buffers(model)
    for name, value in values.items():
        if name in own and own[name].shape != value.shape:
            raise ValueError(f"{name} has shape {[*value.shape]} in the weights, {[*own[name].shape]} in the model")
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
            raise ValueError(f"{len(tensors)} tensors were given, but the model has {len(names)} trainable parameters")
        found = dict(zip(names, tensors, strict=True))
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the weights lack {missing[0]}, and {len(missing) - 1} more of the model's parameters")
    return found
