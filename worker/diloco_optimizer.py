"""DiLoCo as an optimizer, as OpenDiLoCo's scripts write it: nothing else of the training loop changes.

    optimizer = DiLoCoOptimizer(
        model.named_parameters(), batch_size=8, num_inner_steps=500, run="my-run",
        inner_optimizer=partial(AdamW, lr=4e-4), outer_optimizer=partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    )
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()  # the H-th of a round synchronises as well
        optimizer.zero_grad()
        if optimizer.finished:
            break

What is trained with is the run's to say: what the script says of it is compared, and refused where it differs.
"""

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from protocol.spec.run import RunSpec
from worker.diloco import DiLoCo

Parameters = list[nn.Parameter]


class DiLoCoOptimizer(Optimizer):
    """An inner optimizer whose steps are those of a worker of the run `run`, which it joins as it is made.

    params            `model.named_parameters()`, or parameters, which are named by their numbers then; workers of a run
                      name theirs alike
    batch_size        sequences of an inner step: the run's `inner.batch_size`
    num_inner_steps   H: the run's `sync.inner_steps`
    inner_optimizer   makes the inner optimizer of the parameters
    outer_optimizer   makes the outer one, torch's SGD with Nesterov momentum: compared with the run's `outer`, which
                      every worker and the coordinator take their steps by. None: the run's
    scheduler         makes the learning rate's schedule of the inner optimizer; it follows the run's step
    options           those of DiLoCo.connect, `url`, `token`, `name` and `state_dir` among them

    `diloco` is the worker: `diloco.data_seed` seeds the loop's batches, `diloco.report_loss(loss)` tells the loss. All
    else, such as param_groups and state_dict(), is the inner optimizer's, as `inner_optimizer`. A loop that ends before
    `finished` leaves by `close()`, or a `with` block: otherwise it is as if it were killed.

    Raises ValueError where the run has other values, and whatever DiLoCo.connect and entering it raise; `step` raises
    RuntimeError once it has left.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        batch_size: int,
        num_inner_steps: int,
        inner_optimizer: Callable[[Parameters], Optimizer],
        outer_optimizer: Callable[[Parameters], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        *,
        run: str,
        **options: Any,
    ) -> None:
        model = _Parameters(params)
        self.inner_optimizer = inner_optimizer([*model.parameters()])
        if scheduler is not None:
            options["scheduler"] = scheduler(self.inner_optimizer)
        self.diloco = DiLoCo.connect(model, self.inner_optimizer, run=run, **options)
        _compare(self.diloco.spec, batch_size, num_inner_steps, outer_optimizer)
        self.diloco.__enter__()
        self._has_left = False

    def __getattr__(self, name: str) -> Any:
        """Return what is the inner optimizer's: this one has no parameters of its own."""
        if name == "inner_optimizer":  # it could not be made
            raise AttributeError(name)
        return getattr(self.inner_optimizer, name)

    @property
    def finished(self) -> bool:
        """True if training is to stop: the run is over, or this worker was asked to. Then it has handed in and left."""
        if not self._has_left and self.diloco.finished:
            self.close()
        return self._has_left

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one inner step; after the H-th of a round the sync, as DiLoCo does."""
        if self._has_left:
            raise RuntimeError(
                "this worker has left the run, so that a step would only change the model: leave the training loop "
                "once `optimizer.finished`"
            )
        try:
            loss = self.inner_optimizer.step(closure) if closure is not None else self.inner_optimizer.step()
        except BaseException as error:
            self._leave(error)
            raise
        return loss

    def close(self) -> None:
        """Leave the run, and hand in what is done."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if not self._has_left:
            self._has_left = True
            self.diloco.__exit__(None if error is None else type(error), error, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)


class _Parameters(nn.Module):
    """Parameters by name, without a model."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__()
        listed = list(params)
        if not listed:
            raise ValueError("params is empty: give model.named_parameters()")
        if any(isinstance(each, dict) for each in listed):
            raise TypeError("params has groups: give model.named_parameters(), and group them in inner_optimizer")
        self._named = [each if isinstance(each, tuple) else (str(i), each) for i, each in enumerate(listed)]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named)


def _compare(
    spec: RunSpec, batch_size: int, num_inner_steps: int, outer_optimizer: Callable[[Parameters], Optimizer] | None
) -> None:
    outer = {"lr": spec.outer.learning_rate, "momentum": spec.outer.momentum}
    for name, given, key, wanted in (
        ("batch_size", batch_size, "inner.batch_size", spec.inner.batch_size),
        ("num_inner_steps", num_inner_steps, "sync.inner_steps", spec.sync.inner_steps),
    ):
        if given != wanted:
            raise ValueError(f"{name} = {given}, and the run {spec.name} has {key} = {wanted!r}, as all of its workers")
    if outer_optimizer is None:
        return
    made = outer_optimizer([nn.Parameter(torch.zeros(1))])
    has = made.defaults
    is_nesterov = isinstance(made, SGD) and has["nesterov"] and not (has["weight_decay"] or has["maximize"])
    if not is_nesterov or any(has[name] != wanted for name, wanted in outer.items()):
        of_run = f"SGD(lr={outer['lr']}, momentum={outer['momentum']}, nesterov=True)"
        keys = [name for name in ("lr", "momentum", "nesterov", "weight_decay") if name in has]
        told = ", ".join(f"{name}={has[name]}" for name in keys)
        raise ValueError(
            f"outer_optimizer is {type(made).__name__}({told}), and the run {spec.name} takes its outer steps by "
            f"{of_run}: see [outer] of its spec"
        )
