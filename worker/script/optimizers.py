"""What a script hands in to train with: its optimizers, without their wrappers, and whether they train the model.

All of this is found out before the run is joined: afterwards the script would train on, and nothing of it be sent.

A script's learning rate schedules, at the run's step wherever in the run this worker joins or goes on.
"""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from protocol.messages import EvaluationReport
from worker.errors import ModelError
from worker.state.parameters import is_sharded, trainable_parameters

log = logging.getLogger(__name__)


def usable_optimizers(model: nn.Module, given: Any) -> list[Optimizer]:
    """Return the optimizers in `given`, one or a sequence, in order; of accelerate's and Lightning's wrappers what they
    wrap, whose steps are the real ones.

    Raises TypeError and ValueError for what is no optimizer, ModelError for one that trains something else.
    """
    optimizers = [unwrapped(each) for each in (given if isinstance(given, Sequence) else [given])]
    if not optimizers:
        raise ValueError("inner_optimizer is an empty sequence: DiLoCo needs one optimizer at least")
    if len({id(each) for each in optimizers}) < len(optimizers):
        raise ValueError("inner_optimizer has one optimizer twice: give each once, in the order in which they step")
    _check_that_they_train(model, optimizers)
    return optimizers


class InUse:
    """The optimizers of a DiLoCo, within `with`: no other one of this process may count their steps as well."""

    _all: ClassVar[WeakSet[Optimizer]] = WeakSet()

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __enter__(self) -> None:
        """Raises RuntimeError if another DiLoCo has one of them."""
        if any(each in self._all for each in self._optimizers):
            raise RuntimeError(
                "another DiLoCo of this process trains with this optimizer, and has not left its run: one made by a "
                "notebook cell that ran before, for example; end its `with` block first, or restart the process"
            )
        self._all.update(self._optimizers)

    def __exit__(self, *_: object) -> None:
        self._all.difference_update(self._optimizers)


def reported_by(evaluate: Callable[[], EvaluationReport]) -> EvaluationReport:
    """Return what a script's `evaluate` measures. Raises TypeError unless it is an EvaluationReport."""
    report = evaluate()
    if not isinstance(report, EvaluationReport):
        raise TypeError(
            f"evaluate returned {type(report).__name__}: return outerstep.EvaluationReport(loss=…, tokens=…), the mean "
            "held-out loss in nats per token as a float, and the number of tokens that it is the mean of"
        )
    return report


def unwrapped(given: Any) -> Optimizer:
    """Return the optimizer that `given` is or wraps. Raises TypeError if there is none."""
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
            "%d trainable parameters are in no optimizer that DiLoCo was given, such as %s: if another optimizer steps "
            "them, give DiLoCo both, in the order in which they step; if none does, requires_grad_(False) leaves them "
            "out of what is sent",
            len(left),
            left[0],
        )


class FirstUnits:
    """Watches the first units that a loop takes: what loads ahead takes others before they are trained on. One may have
    nothing that can be trained on."""

    def __init__(self, model: nn.Module) -> None:
        # Of sharded parameters it is not autograd that accumulates the gradients.
        parameters = [each for each in trainable_parameters(model).values() if not is_sharded(each)]
        self._handles = [each.register_post_accumulate_grad_hook(self._note) for each in parameters]
        self._has_gradient, self._without = False, 0

    def _note(self, _: Tensor) -> None:
        self._has_gradient = True

    def end(self, *, stepped: bool) -> None:
        """Note that a unit ends. Raises RuntimeError at the second one if none had a step, `stepped`, or a gradient."""
        if not self._handles:
            return
        self._without += 1
        if stepped or self._has_gradient:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        elif self._without > 1:
            raise RuntimeError(
                "units() was asked for a third unit before the first was trained on, as by a DataLoader, which loads "
                "ahead: give that batch_sampler=diloco.unit_sampler(dataset), or take units in the training loop"
            )


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
