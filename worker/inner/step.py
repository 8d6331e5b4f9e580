"""One inner step: the gradient of a batch, in micro-batches, and the optimizers' step."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from protocol.spec.sections import InnerSpec
from worker.errors import BoxError
from worker.inner.clipping import clip_gradients
from worker.inner.loss import Loss
from worker.inner.micro_batch import MicroBatches, is_out_of_memory, memory_told


class InnerStep:
    """The inner steps of `loss.model` by `optimizers`, which count as one. Nothing in a step waits for the device, but
    for fp16, whose `scaler` has to know whether the gradient is finite."""

    def __init__(
        self,
        loss: Loss,
        optimizers: Sequence[torch.optim.Optimizer],
        micro_batches: MicroBatches,
        *,
        inner: InnerSpec,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._loss, self._optimizers, self._micro_batches = loss, optimizers, micro_batches
        self._parameters = [parameter for parameter in loss.model.parameters() if parameter.requires_grad]
        self._inner, self.scaler = inner, scaler
        self._stepping = False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_stepped)  # before a sync registers its own, which comes after

    def gradient(self, batch: Tensor) -> Tensor:
        """Make the gradient of the mean loss of int64[batch, length + 1]; return that loss, a scalar on the device.

        Where the memory does not suffice, the batch is begun again: nothing of it counts twice. Raises BoxError.
        """
        return self._micro_batches.over(batch, self._accumulate, self._drop_gradient)

    def _accumulate(self, micro_batches: tuple[Tensor, ...]) -> Tensor:
        rows = sum(len(each) for each in micro_batches)
        losses = []
        for number, each in enumerate(micro_batches, 1):
            with nullcontext() if number == len(micro_batches) else self._loss.unsynchronised():
                loss = self._loss(each)
                if len(each) < rows:
                    loss = loss * (len(each) / rows)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def apply(self) -> None:
        """Clip the gradient, take the optimizers' step with it, and drop it. An fp16 gradient that is not finite is
        dropped without a step, by all optimizers alike. Raises BoxError where the optimizers' state does not fit."""
        if self.scaler is not None:
            for optimizer in self._optimizers:
                self.scaler.unscale_(optimizer)
        norm = clip_gradients(self._parameters, self._inner)
        finite = True
        if self.scaler is not None:
            finite = self._is_finite(norm)
            self.scaler.update()
        if finite:
            self._take_steps()
        self._drop_gradient()

    def _is_finite(self, norm: Tensor | None) -> bool:
        if norm is None:
            norm = nn.utils.get_total_norm(each.grad for each in self._parameters if each.grad is not None)
        return bool(norm.isfinite())

    def _take_steps(self) -> None:
        """Step, but not through the scaler, which lets a fused optimizer skip in silence, and each one for itself."""
        try:
            for optimizer in self._optimizers:
                self._stepping = True
                optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            what, told = "inner optimizer's step" if self._stepping else "sync", memory_told(error)
            raise BoxError(
                f"the {what} does not fit into the memory: {told}; try --parameters bf16, or a GPU with more"
            ) from error

    def _note_stepped(self, *_: object) -> None:
        self._stepping = False

    def _drop_gradient(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
