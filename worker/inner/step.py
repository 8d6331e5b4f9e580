"""One inner step: the gradient of a batch, in micro-batches, and the optimizers' step."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from protocol.spec.sections import InnerSpec
from worker.errors import BoxError
from worker.inner.loss import Loss
from worker.inner.micro_batch import MicroBatches, is_out_of_memory, memory_error_of
from worker.inner.offload import HostGradients


def clip_gradients(
    parameters: list[nn.Parameter], inner: InnerSpec, offloaded: HostGradients | None = None
) -> Tensor | None:
    """Scale the gradients, of the parameters or `offloaded`, down to the run's `clip_norm` (global L2 norm). Return the
    norm before clipping, a scalar on the device, or None if the run does not clip. Does not synchronize with the
    device."""
    if inner.clip_norm == "none":
        return None
    if offloaded is not None:
        return offloaded.clip(inner.clip_norm)
    return nn.utils.clip_grad_norm_(parameters, inner.clip_norm)


class InnerStep:
    """Takes inner steps on `loss.model`. All `optimizers` together take one inner step.

    A step does not synchronize with the device, except in fp16, where `scaler` must know if the gradient is finite, and
    if the gradients are `offloaded`.
    """

    def __init__(
        self,
        loss: Loss,
        optimizers: Sequence[torch.optim.Optimizer],
        micro_batches: MicroBatches,
        *,
        inner: InnerSpec,
        scaler: torch.amp.GradScaler | None = None,
        offloaded: HostGradients | None = None,
    ) -> None:
        self._loss, self._optimizers, self._micro_batches = loss, optimizers, micro_batches
        self._parameters = [parameter for parameter in loss.model.parameters() if parameter.requires_grad]
        self._inner, self.scaler, self._offloaded = inner, scaler, offloaded
        self._stepping = False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_stepped)  # before DiLoCo registers its own

    def gradient(self, batch: Tensor, mean_over: Tensor | float | None = None) -> Tensor:
        """Compute the gradient of the mean loss of int64[batch, length + 1]; return the loss, a scalar on the device.

        mean_over  the number of targets that the sum of their losses is divided by; None: those of `batch`

        If memory runs out, the batch starts again with smaller micro-batches, and nothing counts twice. Raises BoxError
        if they cannot be smaller.
        """
        return self._micro_batches.over(batch, partial(self._accumulate, mean_over), self._drop_gradient)

    def targets(self, batch: Tensor) -> Tensor | int:
        """Return the number of targets in a batch; see `Loss.targets`."""
        return self._loss.targets(batch)

    def _accumulate(self, mean_over: Tensor | float | None, micro_batches: tuple[Tensor, ...]) -> Tensor:
        targets = [self._loss.targets(each) for each in micro_batches]
        total = sum(targets) if mean_over is None else mean_over
        losses = []
        for number, (each, count) in enumerate(zip(micro_batches, targets, strict=True), 1):
            with nullcontext() if number == len(micro_batches) else self._loss.unsynchronised():
                loss = self._loss(each)
                if isinstance(count, Tensor):
                    loss = loss * (count / torch.clamp(torch.as_tensor(total), min=1))
                elif count != total:
                    loss = loss * (count / total)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def apply(self) -> None:
        """Clip the gradient, step all optimizers, drop the gradient. If an fp16 gradient is not finite, no optimizer
        steps. Raises BoxError if the optimizers' state does not fit into memory."""
        if self.scaler is not None:
            for optimizer in self._optimizers:
                self.scaler.unscale_(optimizer)
        norm = clip_gradients(self._parameters, self._inner, self._offloaded)
        finite = True
        if self.scaler is not None:
            finite = self._is_finite(norm)
            self.scaler.update()
        if finite:
            self._take_steps()
        else:
            self._drop_gradient()

    def _is_finite(self, norm: Tensor | None) -> bool:
        if norm is None:
            norm = nn.utils.get_total_norm(each.grad for each in self._parameters if each.grad is not None)
        return bool(norm.isfinite())

    def _take_steps(self) -> None:
        """Step the optimizers directly: a GradScaler decides per optimizer, and a fused one would skip silently."""
        try:
            for optimizer in self._optimizers:
                self._stepping = True
                optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            what, cause = "inner optimizer's step" if self._stepping else "sync", memory_error_of(error)
            raise BoxError(
                f"the {what} does not fit into memory: {cause}. Try --fit auto, or a GPU with more memory."
            ) from error

    def _note_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepping = False
        if optimizer is self._optimizers[-1]:
            self._drop_gradient()  # before a sync, which needs memory too

    def _drop_gradient(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._offloaded is not None:
            self._offloaded.drop()
