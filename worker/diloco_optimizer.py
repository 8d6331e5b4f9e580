"""DiLoCo as an optimizer, for scripts written for OpenDiLoCo: nothing else in the training loop changes.

    optimizer = DiLoCoOptimizer(
        model.named_parameters(), batch_size=8, num_inner_steps=500, run="my-run",
        inner_optimizer=partial(AdamW, lr=4e-4), outer_optimizer=partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    )
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()  # the H-th of a round synchronises as well; with a GradScaler, optimizer.step(scaler)
        optimizer.zero_grad()
        if optimizer.finished:
            break

The run decides how it is trained. The script's values are compared with the run's, and differences are rejected.
"""

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from protocol.spec.run import RunSpec
from worker.diloco import DiLoCo

Parameters = list[nn.Parameter]

_LINE = "transfers are retried for as long as they take: there is no timeout to set"
_CODEC = "the codecs are sync.upload_codec and sync.download_codec of the run's spec"
_CLOSING = "when a round closes without slow workers is in [members] of the run's spec"
_OVERLAP = "training goes on during transfers if the run's spec has sync.overlap"

# Parameters of OpenDiLoCo's DiLoCoOptimizer and of the hivemind.Optimizer below it -> what Outerstep has instead.
_OF_OPEN_DILOCO = {
    "dht": "workers meet at the coordinator: give url and token",
    "run_id": "give run",
    "optimizer": "give outer_optimizer",
    "target_batch_size": "give batch_size and num_inner_steps",
    "batch_size_per_step": "give batch_size",
    "use_local_updates": "DiLoCo always takes local steps: leave it out",
    "offload_optimizer": "the outer optimizer is always in host memory: leave it out",
    "reuse_grad_buffers": "no gradients are accumulated here: leave it out",
    "average_state_every": "all replicas have the same parameters after every round: leave it out",
    "average_opt_statistics": "the inner optimizer's state is never averaged: leave it out",
    "extra_tensors": "only trainable parameters are averaged: leave it out",
    "grad_averager_factory": "sync.aggregation of the run's spec sets how the mean is taken",
    "averager_opts": _LINE,
    "averaging_timeout": _LINE,
    "allreduce_timeout": _LINE,
    "next_chunk_timeout": _LINE,
    "load_state_timeout": _LINE,
    "shutdown_timeout": _LINE,
    "grad_compression": _CODEC,
    "state_averaging_compression": _CODEC,
    "load_state_compression": _CODEC,
    "all_reduce_strategy": _CLOSING,
    "timeout_waiting_for_peers": _CLOSING,
    "matchmaking_time": _CLOSING,
    "delay_optimizer_step": _OVERLAP,
    "delay_grad_averaging": _OVERLAP,
    "delay_state_averaging": _OVERLAP,
    "client_mode": "every worker only makes outbound requests: leave it out",
    "auxiliary": "the coordinator does this: leave it out",
    "tracker_opts": "the coordinator keeps the progress: leave it out",
    "performance_ema_alpha": "the coordinator keeps the progress: leave it out",
    "verbose": "set the level of the logger `worker`",
}


class DiLoCoOptimizer(Optimizer):
    """An inner optimizer whose steps are those of a worker of the run `run`, which it joins on creation.

    params            `model.named_parameters()`, or parameters, which are then named by their position; the names must
                      be the same on all workers
    batch_size        sequences per inner step: the run's `inner.batch_size`
    num_inner_steps   H: the run's `sync.inner_steps`
    inner_optimizer   an optimizer, or a function that makes one from the parameters
    outer_optimizer   a function that makes the outer optimizer, torch's SGD with Nesterov momentum; compared with the
                      run's `outer`, which every worker and the coordinator use. None: the run's
    scheduler         makes the inner optimizer's learning-rate scheduler, which follows the run's step
    options           those of DiLoCo.connect, such as `url`, `token`, `name` and `state_dir`

    `diloco` is the worker: `diloco.data_seed` seeds the loop's batches, `diloco.report_loss(loss)` reports the loss.
    Everything else, such as param_groups and state_dict(), is the inner optimizer's, available as `inner_optimizer`. A
    loop that ends before `finished` must call `close()`, or use a `with` block: otherwise the worker counts as killed.

    Raises ValueError if the run has other values, TypeError for a parameter that only OpenDiLoCo has (the message names
    the replacement), and what DiLoCo.connect and entering it raise. `step` raises RuntimeError once the worker has
    left.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        batch_size: int,
        num_inner_steps: int,
        inner_optimizer: Optimizer | Callable[[Parameters], Optimizer],
        outer_optimizer: Callable[[Parameters], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        *,
        run: str | None = None,
        **options: Any,
    ) -> None:
        if foreign := [f"{name} ({_OF_OPEN_DILOCO[name]})" for name in options if name in _OF_OPEN_DILOCO]:
            raise TypeError(f"Outerstep does not have these parameters of OpenDiLoCo: {', '.join(foreign)}")
        if run is None:
            raise TypeError("run is missing: give the name of the run to join")
        model = _Parameters(params)
        self.inner_optimizer = (
            inner_optimizer if isinstance(inner_optimizer, Optimizer) else inner_optimizer([*model.parameters()])
        )
        if scheduler is not None:
            options["scheduler"] = scheduler(self.inner_optimizer)
        self.diloco = DiLoCo.connect(model, self.inner_optimizer, run=run, **options)
        _compare(self.diloco.spec, batch_size, num_inner_steps, outer_optimizer)
        self.diloco.__enter__()
        self._has_left = False

    def __getattr__(self, name: str) -> Any:
        """Return the inner optimizer's attribute: this optimizer has no parameters of its own."""
        if name == "inner_optimizer":  # making it failed
            raise AttributeError(name)
        return getattr(self.inner_optimizer, name)

    @property
    def finished(self) -> bool:
        """True if training must stop: the run is over, or this worker was asked to stop. It has then handed in its work
        and left."""
        if not self._has_left and self.diloco.finished:
            self.close()
        return self._has_left

    def step(
        self,
        closure: Callable[[], float] | GradScaler | None = None,
        batch_size: int | None = None,
        scaler: GradScaler | None = None,
    ) -> Any:
        """Take one inner step; after the H-th one of a round also the sync, as DiLoCo does.

        `step(scaler)` and `step(scaler=scaler)` step through a GradScaler, which the loop updates afterwards. To
        unscale gradients before, to clip them for example, call `scaler.unscale_(optimizer.inner_optimizer)`.
        `batch_size` must be the run's. Raises ValueError for another one, and for a closure together with a scaler.
        """
        if isinstance(closure, GradScaler):
            closure, scaler = None, closure
        if closure is not None and scaler is not None:
            raise ValueError("step() takes a closure or a scaler, not both: the closure's loss would not be scaled")
        spec = self.diloco.spec
        if batch_size is not None and batch_size != spec.inner.batch_size:
            raise ValueError(_differs("batch_size", batch_size, spec, "inner.batch_size", spec.inner.batch_size))
        if self._has_left:
            raise RuntimeError(
                "this worker has left the run, so a step would only change the model: leave the training loop "
                "once `optimizer.finished` is true"
            )
        try:
            if scaler is not None:
                loss = scaler.step(self.inner_optimizer)
            else:
                loss = self.inner_optimizer.step(closure) if closure is not None else self.inner_optimizer.step()
        except BaseException as error:
            self._leave(error)
            raise
        return loss

    def close(self) -> None:
        """Hand in the work done, and leave the run."""
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
            raise ValueError(_differs(name, given, spec, key, wanted))
    if outer_optimizer is None:
        return
    made = outer_optimizer([nn.Parameter(torch.zeros(1, device="cpu"))])
    has = made.defaults
    is_nesterov = isinstance(made, SGD) and has["nesterov"] and not (has["weight_decay"] or has["maximize"])
    if not is_nesterov or any(has[name] != wanted for name, wanted in outer.items()):
        of_run = f"SGD(lr={outer['lr']}, momentum={outer['momentum']}, nesterov=True)"
        keys = [name for name in ("lr", "momentum", "nesterov", "weight_decay") if name in has]
        settings = ", ".join(f"{name}={has[name]}" for name in keys)
        raise ValueError(
            f"outer_optimizer is {type(made).__name__}({settings}), but the run {spec.name} takes its outer steps with "
            f"{of_run}: see [outer] in its spec"
        )


def _differs(name: str, given: int, spec: RunSpec, key: str, wanted: int | str) -> str:
    return f"{name} = {given}, but the run {spec.name} has {key} = {wanted!r}, the same for all its workers"
