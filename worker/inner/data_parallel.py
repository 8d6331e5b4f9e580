"""A model on all processes of a worker: replicated (DistributedDataParallel) or sharded (FSDP2, fully_shard)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from worker.errors import BoxError
from worker.inner.execution import layers_of
from worker.inner.loss import Loss

Mode = Literal["ddp", "fsdp"]

# Bytes of a replica per parameter: parameter, gradient and AdamW's two moments, in fp32.
_REPLICA_BYTES = 16
_SHARE = 0.6  # fraction of a GPU's memory for a replica; activations need the rest


def choose_mode(elements: int, budget_bytes: float | None, wanted: Literal["auto", "ddp", "fsdp"]) -> tuple[Mode, str]:
    """Return the mode and the reason in words. `auto` replicates if a replica fits into a GPU, since replicas
    communicate less, and shards otherwise.

    elements      parameters of the model
    budget_bytes  GPU memory that a replica may use (`replica_budget`); None without a GPU
    """
    if wanted != "auto":
        return wanted, f"mode {wanted}: --parallel {wanted}"
    if budget_bytes is None:
        return "ddp", "mode ddp: without a GPU, each process has a replica"
    need = elements * _REPLICA_BYTES
    mode: Mode = "ddp" if need <= budget_bytes else "fsdp"
    return mode, f"mode {mode}: a replica takes {need / 1e9:.1f} GB of the {budget_bytes / 1e9:.1f} GB available to it"


def replica_budget(device: torch.device) -> float | None:
    """Return how many bytes of the device a replica may use; None if it is not a GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory * _SHARE


def shard(model: nn.Module) -> None:
    """Shard the parameters of each layer over all processes, in place; `distribute` shards the rest of the model."""
    from torch.distributed.fsdp import fully_shard  # takes seconds to import

    layers = layers_of(model)
    if not layers:
        raise BoxError(
            f"--parallel fsdp: {type(model).__name__} has no torch.nn.ModuleList or Sequential of layers to shard. "
            "Use --parallel ddp."
        )
    for layer in layers:
        fully_shard(layer)


class _LossModule(nn.Module):
    """The forward pass and its loss as one module, for DDP or FSDP to wrap: a separate head is not called through the
    model, so wrapping the model alone would miss it."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = loss.model, loss

    def forward(self, batch: Tensor) -> Tensor:
        return self._loss(batch)


@dataclass(frozen=True)
class DistributedLoss(Loss):
    """The loss computed by `wrapped`, the DDP or FSDP module, which averages gradients over all processes after each
    backward pass outside of `unsynchronised`."""

    wrapped: Any = None

    def __call__(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.wrapped(batch)
        if not torch.is_grad_enabled() and not isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.reshard()  # a backward pass would do this; otherwise the gathered parameters stay
        return loss

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        if isinstance(self.wrapped, DistributedDataParallel):
            with self.wrapped.no_sync():
                yield
        else:  # a full gradient would not fit: FSDP reduces after every backward pass
            yield


def distribute(loss: Loss, mode: Mode, device: torch.device) -> DistributedLoss:
    """Return the loss of the same model, trained by all processes. Build the optimizers afterwards: `fsdp` replaces the
    parameters."""
    wrapped: Any = _LossModule(loss)
    if mode == "ddp":
        wrapped = DistributedDataParallel(wrapped, device_ids=[device] if device.type == "cuda" else None)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(wrapped)
    return DistributedLoss(loss.model, loss.precision, loss.head, loss.conversations, wrapped)
