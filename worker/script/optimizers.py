"""What a script passes in to train with: optimizers, unwrapped and checked, schedulers, and its evaluation.

Everything is checked before the run is joined: afterwards the script would train on, and nothing of it would be sent.
"""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from protocol.messages import EvaluationReport
from worker.errors import ModelError
from worker.state.parameters import trainable_parameters

log = logging.getLogger(__name__)


def usable_optimizers(model: nn.Module, given: Any) -> list[Optimizer]:
    """Return the optimizers in `given`, one or a sequence, in order. Wrappers of accelerate and Lightning are replaced
    by what they wrap, whose steps are the real ones.

    Raises TypeError and ValueError for anything but optimizers, ModelError for one that trains something else.
    """
    optimizers = [unwrapped(each) for each in (given if isinstance(given, Sequence) else [given])]
    if not optimizers:
        raise ValueError("inner_optimizer is an empty sequence: DiLoCo needs at least one optimizer")
    if len({id(each) for each in optimizers}) < len(optimizers):
        raise ValueError(
            "inner_optimizer contains one optimizer twice: give each once, in the order in which they step"
        )
    _check_that_they_train(model, optimizers)
    return optimizers


def reported_by(evaluate: Callable[[], EvaluationReport]) -> EvaluationReport:
    """Return the result of a script's `evaluate`. Raises TypeError unless it is an EvaluationReport."""
    report = evaluate()
    if not isinstance(report, EvaluationReport):
        raise TypeError(
            f"evaluate returned {type(report).__name__}: return outerstep.EvaluationReport(loss=…, tokens=…), with "
            "the mean held-out loss in nats per token as a float, and the number of tokens it was measured on"
        )
    return report


def unwrapped(given: Any) -> Optimizer:
    """Return the optimizer that `given` is or wraps. Raises TypeError if there is none."""
    while isinstance(inner := getattr(given, "optimizer", None), Optimizer):
        given = inner
    if not isinstance(given, Optimizer):
        raise TypeError(
            f"inner_optimizer is of type {type(given).__name__}, which is no torch.optim.Optimizer and does not "
            "wrap one as its `optimizer`: give the optimizer whose step() changes the parameters"
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
                f"{kind} trains none of the model's parameters: it was made for another model, it holds copies of "
                "them, or they were replaced later; make it from this model's parameters()"
            )
        if foreign:
            raise ModelError(
                f"{kind} also trains {len(foreign)} parameters that are not in the model, the first of shape "
                f"{list(foreign[0].shape)}: they would not reach other workers; make them part of the model"
            )
    stepped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    left = [name for name, parameter in trainable_parameters(model).items() if id(parameter) not in stepped]
    if left:
        log.warning(
            "%d trainable parameters, such as %s, are in none of the optimizers that DiLoCo was given. If another "
            "optimizer steps them, give DiLoCo both, in the order in which they step. If none does, call "
            "requires_grad_(False), so that they are not sent",
            len(left),
            left[0],
        )


class RunSchedules:
    """The schedulers in `given` (one, a sequence, or None), kept at the run's step, wherever in the run this worker
    joins or resumes.

    A scheduler that must go to a step other than the next one starts again and takes the steps one by one: many
    schedulers compute a value from the one before. So the script's own `scheduler.step()` has no effect.

    If `given` is None, `warn_of_others` warns of a scheduler. An empty sequence means that the script follows the run's
    step itself.

    `steps` is the run's number of inner steps. Raises TypeError for a scheduler that does not depend on the step alone,
    ValueError for one of another optimizer, or with too few steps.
    """

    def __init__(self, given: Any, optimizers: Sequence[Optimizer], steps: int) -> None:
        self._unknown_to = list(optimizers) if given is None else []  # expected to have no scheduler
        listed = given if isinstance(given, Sequence) else [] if given is None else [given]
        self._schedules = [_Schedule(_usable(each, optimizers, steps)) for each in listed]

    def set(self, step: int) -> None:
        """Set the scheduled values to those of inner step `step` of the run, counted from 0."""
        for schedule in self._schedules:
            schedule.set(step)

    def warn_of_others(self) -> None:
        """Warn once if an optimizer has a scheduler that was not given."""
        scheduled = [type(each).__name__ for each in self._unknown_to if _has_scheduler(each)]
        if scheduled:
            self._unknown_to = []
            log.warning(
                "the learning rate of %s has a scheduler that DiLoCo was not given. If a worker joins late or is "
                "restarted, the scheduler starts again, and the rate differs from other workers'. Give connect(…, "
                "scheduler=scheduler), or scheduler=[] if it follows diloco.global_step itself",
                scheduled[0],
            )


class _Schedule:
    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self._is_set = scheduler, False
        self._beginning = copy.deepcopy(scheduler.state_dict())
        self._rates = [copy.deepcopy(_scheduled(group)) for group in scheduler.optimizer.param_groups]

    def set(self, step: int) -> None:
        if not self._is_set or self._scheduler.last_epoch > step:  # a snapshot may have the values of another step
            self._scheduler.load_state_dict(copy.deepcopy(self._beginning))
            for group, rates in zip(self._scheduler.optimizer.param_groups, self._rates, strict=True):
                group.update(copy.deepcopy(rates))
            self._is_set = True
        if self._scheduler.last_epoch == step:
            return
        with warnings.catch_warnings():
            # it may move to any step before this process has stepped
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            while self._scheduler.last_epoch < step:
                self._scheduler.step()


def _has_scheduler(optimizer: Optimizer) -> bool:
    """Return True if the optimizer has a scheduler: each records its initial rate."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def _scheduled(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _usable(given: Any, optimizers: Sequence[Optimizer], steps: int) -> LRScheduler:
    while isinstance(inner := getattr(given, "scheduler", None), LRScheduler):  # accelerate's wrapper
        given = inner
    kind = type(given).__name__
    if not isinstance(given, LRScheduler) or isinstance(given, ReduceLROnPlateau):
        raise TypeError(
            f"scheduler is of type {kind}, which does not depend on the step alone: give a scheduler of "
            "torch.optim.lr_scheduler other than ReduceLROnPlateau, which each worker would step by its own loss"
        )
    if all(unwrapped(given.optimizer) is not each for each in optimizers):
        raise ValueError(f"the scheduler, a {kind}, is not for an optimizer that DiLoCo was given")
    if (has := _steps_of(given)) < steps:
        raise ValueError(
            f"the scheduler, a {kind}, has rates for {has} steps, but the run has {steps} inner steps (sync.rounds "
            "* sync.inner_steps of the spec): make it for that many"
        )
    return given


def _steps_of(scheduler: LRScheduler) -> float:
    """Return the number of steps that the scheduler has rates for; infinity if it has one for every step."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_steps_of, scheduler._schedulers))  # noqa: SLF001, no public name
    if isinstance(scheduler, SequentialLR):
        starts, parts = [0, *scheduler._milestones], scheduler._schedulers  # noqa: SLF001
        for start, following, part in zip(starts, [*starts[1:], math.inf], parts, strict=True):
            if (end := start + _steps_of(part)) < following:
                return end
    return math.inf
