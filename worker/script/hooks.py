"""The hooks on a script's optimizers: the last one's counts inner steps, and steps that make no sense raise.

A step that belongs to no round must not pass silently: the script would train on, and nothing of it would be sent.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from worker.rounds.training import InnerSteps
from worker.script.optimizers import RunSchedules
from worker.state.writes import ForeignWrites

# The hooks that reject a step before the run is joined: one per optimizer, of the latest DiLoCo that it was given to.
_unjoined: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


# What watches the steps of all optimizers of this process. Torch iterates over its global hooks while optimizers of
# other threads step, so they are registered once and stay.
_watching: set[ForeignWrites] = set()


def _before_each(*step: Any) -> None:
    for each in tuple(_watching):
        each.before_other(*step)


def _after_each(*step: Any) -> None:
    for each in tuple(_watching):
        each.after_other(*step)


register_optimizer_step_pre_hook(_before_each)
register_optimizer_step_post_hook(_after_each)


class InUse:
    """The optimizers of a DiLoCo, within `with`: no other DiLoCo of this process may count their steps as well."""

    _all: ClassVar[WeakSet[Optimizer]] = WeakSet()

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __enter__(self) -> None:
        """Raises RuntimeError if another DiLoCo has one of them."""
        if any(each in self._all for each in self._optimizers):
            raise RuntimeError(
                "another DiLoCo in this process uses this optimizer and has not left its run (made by a notebook "
                "cell that ran before, for example): end its `with` block first, or restart the process"
            )
        self._all.update(self._optimizers)

    def __exit__(self, *_: object) -> None:
        self._all.difference_update(self._optimizers)


class StepHooks:
    """The hooks of one DiLoCo on its optimizers, which step one after the other for an inner step.

    Until they are attached, any step raises RuntimeError: the run is not joined.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], steps: InnerSteps, writes: ForeignWrites, schedules: RunSchedules
    ) -> None:
        self._optimizers, self._steps, self._writes, self._schedules = optimizers, steps, writes, schedules
        self._check: Callable[[], None] = lambda: None
        self.allow_steps()
        for each in optimizers:
            _unjoined[each] = each.register_step_pre_hook(_refuse_to_train_alone)

    def allow_steps(self) -> None:
        """Remove the hooks that reject steps before the run is joined."""
        for each in self._optimizers:
            if (hook := _unjoined.pop(each, None)) is not None:
                hook.remove()

    def attach(self, resources: ExitStack, check: Callable[[], None], count: Callable[[Optimizer], None]) -> None:
        """Attach the hooks until `resources` are closed. `check` raises if no inner step may be done any more; `count`
        is called after each inner step, with the last optimizer."""
        self._check = check
        *others, last = self._optimizers
        for each in self._optimizers:
            resources.callback(each.register_step_pre_hook(self._before_any).remove)
            resources.callback(each.register_step_post_hook(self._after_any).remove)
        resources.callback(last.register_step_pre_hook(self._before_last).remove)
        for each in others:
            resources.callback(each.register_step_pre_hook(self._before_other).remove)
        resources.callback(last.register_step_post_hook(lambda optimizer, *_: count(optimizer)).remove)
        _watching.add(self._writes)
        resources.callback(_watching.discard, self._writes)

    def _before_any(self, *_: Any) -> None:
        """Set the run's learning rate. Raises if the run is over, or if anything else has written to the parameters."""
        self._check()
        self._writes.before_step()
        self._schedules.warn_of_others()
        self._schedules.set(self._steps.global_step)

    def _after_any(self, *_: Any) -> None:
        self._writes.after_step()

    def _before_other(self, *_: Any) -> None:
        """Raise RuntimeError for a step after the last optimizer's: the sync would come before it."""
        if self._steps.unit_stepped:
            raise RuntimeError(
                "an inner optimizer steps after the last one of the sequence that DiLoCo was given, which ends "
                "the inner step: call step() in that order, once per unit for each"
            )

    def _before_last(self, *_: Any) -> None:
        """Raise RuntimeError for a second step on one unit: it would count as the next unit's."""
        if self._steps.unit_stepped:
            raise RuntimeError(
                "the optimizer steps a second time for one unit of units(): each unit is for one inner step, and units "
                "that were never trained on would count as trained. Accumulate the gradients of a unit's batches and "
                "step once, or do without units() and draw batches with diloco.data_seed: then every step counts as one"
            )


def _refuse_to_train_alone(*_: Any) -> None:
    raise RuntimeError(
        "the optimizer steps, but the run was not joined: DiLoCo is a context manager, so train within `with "
        "DiLoCo.connect(...) as diloco:`; to train without the run first, do that before DiLoCo is made"
    )
