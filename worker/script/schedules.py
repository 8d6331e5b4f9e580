"""A script's learning rate schedules, at the run's step wherever in the run this worker joins or goes on."""

import copy
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from worker.script.usable import unwrapped

log = logging.getLogger(__name__)


class RunSchedules:
    """The schedulers in `given`, one or a sequence or None, whose step is the run's from the first `set` on.

    Where a scheduler has to go to another step than the next, it begins anew and takes the steps one by one: the value
    of many is only known from the one before. So a script's own `scheduler.step()` changes nothing.

    If `given` is None, `warn_of_others` warns of a scheduler. An empty sequence says that the script follows the run's
    step by itself.

    `steps` are the run's inner steps. Raises TypeError for what is no function of the step, ValueError for a scheduler
    of another optimizer, or of fewer steps.
    """

    def __init__(self, given: Any, optimizers: Sequence[Optimizer], steps: int) -> None:
        self._unknown_to = list(optimizers) if given is None else []  # that are to be without a scheduler
        listed = given if isinstance(given, Sequence) else [] if given is None else [given]
        self._schedules = [_Schedule(_usable(each, optimizers, steps)) for each in listed]

    def set(self, step: int) -> None:
        """Set what the schedulers schedule to what it is for inner step `step` of the run, counted from 0."""
        for schedule in self._schedules:
            schedule.set(step)

    def warn_of_others(self) -> None:
        """Warn once where a scheduler that is not known here schedules an optimizer."""
        scheduled = [type(each).__name__ for each in self._unknown_to if _has_scheduler(each)]
        if scheduled:
            self._unknown_to = []
            log.warning(
                "the learning rate of %s has a scheduler that DiLoCo was not given: in a worker that joins late or is "
                "restarted it begins anew, at another rate than the other workers'. Give "
                "connect(…, scheduler=scheduler); scheduler=[] where it follows diloco.global_step by itself",
                scheduled[0],
            )


class _Schedule:
    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self._is_set = scheduler, False
        self._beginning = copy.deepcopy(scheduler.state_dict())
        self._rates = [copy.deepcopy(_scheduled(group)) for group in scheduler.optimizer.param_groups]

    def set(self, step: int) -> None:
        if not self._is_set or self._scheduler.last_epoch > step:  # a snapshot has the rates of another step
            self._scheduler.load_state_dict(copy.deepcopy(self._beginning))
            for group, rates in zip(self._scheduler.optimizer.param_groups, self._rates, strict=True):
                group.update(copy.deepcopy(rates))
            self._is_set = True
        if self._scheduler.last_epoch == step:
            return
        with warnings.catch_warnings():
            # They may go anywhere before this process has stepped.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            while self._scheduler.last_epoch < step:
                self._scheduler.step()


def _has_scheduler(optimizer: Optimizer) -> bool:
    """Return True if a scheduler was made for the optimizer: each notes the rate that it begins with."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def _scheduled(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _usable(given: Any, optimizers: Sequence[Optimizer], steps: int) -> LRScheduler:
    while isinstance(inner := getattr(given, "scheduler", None), LRScheduler):  # accelerate's wrapper
        given = inner
    kind = type(given).__name__
    if not isinstance(given, LRScheduler) or isinstance(given, ReduceLROnPlateau):
        raise TypeError(
            f"scheduler is of type {kind}, which is no function of the run's step: give a scheduler of "
            "torch.optim.lr_scheduler other than ReduceLROnPlateau, which every worker would step by a loss of its own"
        )
    if all(unwrapped(given.optimizer) is not each for each in optimizers):
        raise ValueError(f"the scheduler, a {kind}, is not of an optimizer that DiLoCo was given")
    if (has := _steps_of(given)) < steps:
        raise ValueError(
            f"the scheduler, a {kind}, has rates for {has} steps, and the run has {steps} inner steps: make it for as "
            "many, sync.rounds * sync.inner_steps of the spec"
        )
    return given


def _steps_of(scheduler: LRScheduler) -> float:
    """Return the steps that the scheduler has rates for; infinity for one that has a rate for every step."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_steps_of, scheduler._schedulers))  # noqa: SLF001, which have no public name
    if isinstance(scheduler, SequentialLR):
        starts, parts = [0, *scheduler._milestones], scheduler._schedulers  # noqa: SLF001
        for start, following, part in zip(starts, [*starts[1:], math.inf], parts, strict=True):
            if (end := start + _steps_of(part)) < following:
                return end
    return math.inf
