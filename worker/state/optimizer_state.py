"""Nested dictionaries, lists and tuples of tensors and plain values, such as an optimizer's state_dict.

The states of the inner optimizers as a process holds them, and put together anew for other processes.

Under fully_shard each process has a stretch of every parameter, and of what its optimizer keeps for each element. That
is what it saves. Who goes on with another number of processes takes the stretches that are its own from all of them.

The points that schedule-free optimizers keep beside the parameters (arXiv 2405.15682, section 2).

There the parameters are y, at which gradients are taken, and the state has z, which takes the steps; x, their average,
is not kept but follows from the two. A sync moves y to where the run is: z has to go the same way, or the next inner
steps would pull the parameters back to where this worker alone would be.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from worker.state.parameters import held, is_sharded, local_part


def with_each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same dictionaries, lists and tuples, with `change(tensor)` in the place of every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_each_tensor(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_each_tensor(each, change) for each in value)
    return value


Stretch = tuple[int, int]

log = logging.getLogger(__name__)


def stretches(optimizer: Optimizer) -> list[Stretch]:
    """Return what is here of each of the optimizer's parameters, flattened, in the order of its state."""
    return [held("of an optimizer", each) for each in _parameters(optimizer)]


def local_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with what is here of sharded tensors in their place. Nothing is copied."""
    state: dict[str, Any] = with_each_tensor(optimizer.state_dict(), local_part)
    return state


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what the script has set of each group of parameters, its learning rate for one: numbers and the like."""
    return [
        {key: value for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
        | {key: float(value) for key, value in group.items() if isinstance(value, Tensor) and value.numel() == 1}
        for group in optimizer.param_groups
    ]


def keep_changed_settings(optimizer: Optimizer, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Have the optimizer, which has just loaded a state, keep the settings that the script changed: those that differ
    between its last process, `before`, and this one, `now`. Warn of them. All others, such as a rate that has decayed
    since, stay as they were loaded."""
    told: dict[str, None] = {}
    for group, was, values in zip(optimizer.param_groups, before, now, strict=False):
        if "initial_lr" not in values:  # of a scheduler that is not there any more
            group.pop("initial_lr", None)
        for key, value in values.items():
            if key not in was or was[key] == value:
                continue
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
            told[f"{key} = {value}, and {was[key]} before"] = None
    if told:
        log.warning(
            "%s was changed in this script since the snapshot was written: %s; the script's values are used from now "
            "on, and the optimizer's moments are those of the snapshot",
            type(optimizer).__name__,
            "; ".join(told),
        )


def load_local_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `local_state` or `reassembled` returned. Raises ValueError where it is not this optimizer's."""
    parameters = _parameters(optimizer)
    by_index = {
        index: {key: _like(parameters[index], value) for key, value in values.items()}
        if index < len(parameters)
        else {}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": by_index})


def reassembled(saved: Sequence[tuple[Sequence[Stretch], dict[str, Any]]], wanted: Sequence[Stretch]) -> dict[str, Any]:
    """Return the state of a process that holds the stretches `wanted`, of what other processes `saved`: the stretches
    that each had, and its state. Raises ValueError where something is kept that is not one value for each element."""
    first = saved[0][1]
    by_index = {
        index: {
            key: _stretch([(had[index], state["state"][index][key]) for had, state in saved], wanted[index], key)
            for key in values
        }
        for index, values in first["state"].items()
        if index < len(wanted)
    }
    return first | {"state": by_index}


def _stretch(parts: list[tuple[Stretch, Any]], wanted: Stretch, key: str) -> Any:
    first = parts[0][1]
    if not isinstance(first, Tensor) or first.ndim == 0:
        return first
    if any(value.numel() != stop - start for (start, stop), value in parts):
        raise ValueError(f"its {key!r} is not one value for each element of a parameter")
    start, stop = wanted
    out = torch.empty(stop - start, dtype=first.dtype)
    for (has, until), value in parts:
        low, high = max(start, has), min(stop, until)
        if low < high:
            out[low - start : high - start] = value.reshape(-1)[low - has : high - has]
    return out


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _like(parameter: Tensor, value: Any) -> Any:
    """Return a value for each element as the parameter has its elements: sharded, in its shape."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    local = local_part(parameter)
    if value.numel() != local.numel():
        return value
    value = value.reshape(local.shape)
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor  # which takes seconds to import, and is there already

    sharded: Any = parameter
    return DTensor.from_local(
        value.to(local.device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


_POINT = "z"  # as schedulefree calls it


class OwnPoints:
    """Those of the optimizers in the sequence that have some."""

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self._optimizers = [each for each in optimizers if keeps_points(each)]

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return what of the parameter's own point is here, in its memory; None where there is none, or none yet."""
        for optimizer in self._optimizers:
            point = optimizer.state.get(parameter, {}).get(_POINT)
            if point is not None:
                return local_part(point)
        return None

    @torch.no_grad()
    def end(self) -> None:
        """Have them be the parameters, so that nothing leads away from these any more."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    point = self.of(parameter)
                    if point is not None:
                        point.copy_(local_part(parameter))


def keeps_points(optimizer: Optimizer) -> bool:
    """Return True if the optimizer is to be told whether its parameters are trained or evaluated, as schedule-free ones
    are."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
