"""The model on all processes of a worker: as replicas (DistributedDataParallel), or sharded (FSDP2, fully_shard)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from worker.errors import BoxError
from worker.inner.layers import layers_of
from worker.inner.loss import Loss

Mode = Literal["ddp", "fsdp"]

# Of an element of the model in a replica: parameter, gradient, two moments of AdamW, in fp32.
_REPLICA_BYTES = 16
_SHARE = 0.6  # of a GPU's memory that these may take: activations need the rest


def choose_mode(elements: int, room_bytes: float | None, wanted: Literal["auto", "ddp", "fsdp"]) -> tuple[Mode, str]:
    """Return the mode that is wanted, or the one that fits, and why: replicas, which send less, where a GPU has room
    for one. `room_bytes`: what a replica may take of each (`replica_room`); None: there is none."""
    if wanted != "auto":
        return wanted, f"mode {wanted}: --mode {wanted}"
    if room_bytes is None:
        return "ddp", "mode ddp: processes without a GPU have a replica each"
    need = elements * _REPLICA_BYTES
    mode: Mode = "ddp" if need <= room_bytes else "fsdp"
    return mode, f"mode {mode}: a replica takes {need / 1e9:.1f} GB of the {room_bytes / 1e9:.1f} GB that it may"


def replica_room(device: torch.device) -> float | None:
    """Return the bytes of the device that a replica may take; None where it is no GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory * _SHARE


def shard(model: nn.Module) -> None:
    """Shard the parameters of each layer over all processes, in place; `spread` does the rest of the model."""
    from torch.distributed.fsdp import fully_shard  # which takes seconds to import

    layers = layers_of(model)
    if not layers:
        raise BoxError(
            f"--mode fsdp: {type(model).__name__} has no torch.nn.ModuleList or Sequential of layers to shard one by "
            "one; use --mode ddp"
        )
    for layer in layers:
        fully_shard(layer)


class _Whole(nn.Module):
    """The forward pass with its loss as one module: what surrounds it surrounds the head as well, which is not called
    by the model itself."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = loss.model, loss

    def forward(self, batch: Tensor) -> Tensor:
        return self._loss(batch)


@dataclass(frozen=True)
class SpreadLoss(Loss):
    """The loss, by way of what averages gradients over all processes: `whole`, after each backward pass but those
    within `unsynchronised`."""

    whole: Any = None

    def __call__(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.whole(batch)
        if not torch.is_grad_enabled() and not isinstance(self.whole, DistributedDataParallel):
            self.whole.reshard()  # which a backward pass does by itself: what is gathered would stay as it is
        return loss

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        if isinstance(self.whole, DistributedDataParallel):
            with self.whole.no_sync():
                yield
        else:  # a whole gradient would not fit: sharded parameters have theirs reduced each time
            yield


def spread(loss: Loss, mode: Mode, device: torch.device) -> SpreadLoss:
    """Return the same loss, of a model that all processes train. The optimizers are to be made after it: for `fsdp` it
    replaces the parameters."""
    whole: Any = _Whole(loss)
    if mode == "ddp":
        whole = DistributedDataParallel(whole, device_ids=[device] if device.type == "cuda" else None)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(whole)
    return SpreadLoss(loss.model, loss.precision, loss.head, whole)
