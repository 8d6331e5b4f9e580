"""The states of the inner optimizers: saved by process, reassembled for another number of processes, moved at a sync.

Under fully_shard, each process has a stretch of every parameter, and of what its optimizer keeps for each element. It
saves that. When the worker continues with another number of processes, each takes its own stretches from all of the
saved ones.

Schedule-free optimizers (arXiv 2405.15682, section 2) keep a point of their own beside the parameters. The parameters
are y, where gradients are taken; the state has z, which takes the steps; their average x follows from the two. A sync
moves y to where the run is, so z has to move the same way: otherwise the next inner steps would pull the parameters
back to where this worker alone would be.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from worker.state.parameters import held, is_sharded, local_part


def with_each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same dictionaries, lists and tuples, with `change(tensor)` in place of every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_each_tensor(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_each_tensor(each, change) for each in value)
    return value


Stretch = tuple[int, int]
HELD = "held"  # the key of a parameter group that says how its moments are held, if not as torch does

log = logging.getLogger(__name__)


def stretches(optimizer: Optimizer) -> list[Stretch]:
    """Return the stretch of each of the optimizer's flattened parameters that is here, in the order of its state."""
    return [held("of an optimizer", each) for each in _parameters(optimizer)]


def local_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with the local part of each sharded tensor. Nothing is copied."""
    state: dict[str, Any] = with_each_tensor(optimizer.state_dict(), local_part)
    return state


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what the script has set for each parameter group, such as the learning rate: numbers and the like."""
    return [
        {key: value for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
        | {key: float(value) for key, value in group.items() if isinstance(value, Tensor) and value.numel() == 1}
        for group in optimizer.param_groups
    ]


def keep_changed_settings(optimizer: Optimizer, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Keep the settings that the script has changed in an optimizer that has just loaded a state, and warn of them:
    those that differ between its last process, `before`, and this one, `now`. All others, such as a rate that has
    decayed since, stay as loaded."""
    differences: dict[str, None] = {}
    for group, was, values in zip(optimizer.param_groups, before, now, strict=False):
        if "initial_lr" not in values:  # from a scheduler that is not used any more
            group.pop("initial_lr", None)
        for key, value in values.items():
            if key not in was or was[key] == value or _is_scheduled(key, was, values):
                continue
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
            differences[f"{key} = {value}, before: {was[key]}"] = None
    if differences:
        log.warning(
            "the script's settings of %s have changed since the snapshot was written: %s. The script's values are "
            "used, with the optimizer's moments from the snapshot",
            type(optimizer).__name__,
            "; ".join(differences),
        )


# What a scheduler sets, and its own setting for that.
_SCHEDULED_BY = {"lr": "initial_lr", "momentum": "base_momentum", "betas": "base_momentum"}


def _is_scheduled(key: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return True if a scheduler with unchanged settings sets `key`: its value depends on when it was read."""
    scheduler = _SCHEDULED_BY.get(key)
    return scheduler in now and now[scheduler] == before.get(scheduler)


def load_local_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `local_state` or `reassembled` returned. Raises ValueError if it does not belong to this optimizer, or
    has moments in 8 bits and this optimizer has not, or the other way round: torch would load the codes as values."""
    for before, now in zip(state["param_groups"], optimizer.param_groups, strict=False):
        saved, own = (group.get(HELD, "fp32") for group in (before, now))
        if saved != own and "8bit" in (saved, own):
            raise ValueError(
                f"the snapshot's moments are held in {saved}, and this worker holds them in {own}; start it with "
                f"--optimizer-state {saved}, or with another --state-dir"
            )
    parameters = _parameters(optimizer)
    by_index = {
        index: {key: _like(parameters[index], value) for key, value in values.items()}
        if index < len(parameters)
        else {}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": by_index})


def reassembled(saved: Sequence[tuple[Sequence[Stretch], dict[str, Any]]], wanted: Sequence[Stretch]) -> dict[str, Any]:
    """Return the state of a process that holds the stretches `wanted`, from what other processes `saved`: each one's
    stretches and state. Raises ValueError for a state that is not one value per element."""
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
    out = torch.empty(stop - start, dtype=first.dtype, device="cpu")
    for (has, until), value in parts:
        low, high = max(start, has), min(stop, until)
        if low < high:
            out[low - start : high - start] = value.reshape(-1)[low - has : high - has]
    return out


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _like(parameter: Tensor, value: Any) -> Any:
    """Return a value that has one element per element of the parameter, sharded and shaped like it."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    local = local_part(parameter)
    if value.numel() != local.numel():
        return value
    value = value.reshape(local.shape)
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor  # takes seconds to import, and is imported already

    sharded: Any = parameter
    return DTensor.from_local(
        value.to(local.device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


_POINT = "z"  # the name that schedulefree uses


class ScheduleFreePoints:
    """The points z of those of the optimizers that are schedule-free."""

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self._optimizers = [each for each in optimizers if is_schedule_free(each)]

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return the local part of the parameter's point, sharing its memory; None if there is none, or none yet."""
        for optimizer in self._optimizers:
            point = optimizer.state.get(parameter, {}).get(_POINT)
            if point is not None:
                return local_part(point)
        return None

    @torch.no_grad()
    def end(self) -> None:
        """Set the points to the parameters, so that nothing moves away from these any more."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    point = self.of(parameter)
                    if point is not None:
                        point.copy_(local_part(parameter))


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Return True if the optimizer has train() and eval(), as schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
