"""Micro-batches: how much of a batch goes through the model at once. The gradient is always the batch's."""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor

from worker.errors import BoxError
from worker.inner.loss import LOGITS_BYTES

T = TypeVar("T")

# What torch says where memory is out and the error is not an OutOfMemoryError: CUDA's own calls, cuBLAS, the CPU.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")

log = logging.getLogger(__name__)


class MicroBatches:
    """The size of micro-batches in sequences: `wanted`; or, where that is None, `at_most` and half of it whenever the
    memory does not suffice."""

    def __init__(self, wanted: int | None, at_most: int) -> None:
        self._searching = wanted is None
        self.size = at_most if wanted is None else wanted

    def over(
        self, batch: Tensor, act: Callable[[tuple[Tensor, ...]], T], undo: Callable[[], object] = lambda: None
    ) -> T:
        """Return `act` of the batch's micro-batches. Where that runs out of memory, `undo`, and act on smaller ones.

        Raises BoxError where they may not be smaller.
        """
        while True:
            try:
                return act(batch.split(self.size))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(min(self.size, len(batch)), error)
            # Only here, with the error, have the frames gone that held the activations.
            undo()
            if batch.device.type == "cuda":
                torch.cuda.empty_cache()

    def _halve(self, tried: int, error: RuntimeError) -> None:
        told = memory_told(error)
        if not self._searching:
            raise BoxError(
                f"--micro-batch {self.size} does not fit into the memory: {told}; give fewer, or auto where "
                "one process is the worker"
            ) from error
        if tried == 1:
            raise BoxError(
                f"not even one sequence fits into the memory: {told}; try --activation-checkpointing, --precision "
                "bf16 or --parameters bf16"
            ) from error
        self.size = (tried + 1) // 2
        log.warning("micro-batches of %d sequences do not fit into the memory; from now on of %d", tried, self.size)


def choose_micro_batch(
    wanted: int | Literal["auto"], batch: int, processes: int = 1, logits_bytes: int | None = None
) -> tuple[MicroBatches, str]:
    """Return the size that is wanted, or how it is looked for, of the `batch` sequences that each process has; and why.

    Several processes cannot look for it: one that runs out of memory would leave the others waiting. `auto` begins with
    the whole batch; on a CPU, where too much swaps or kills, and does not fail, with what keeps the logits within
    LOGITS_BYTES: `logits_bytes` are those of a sequence there.
    """
    if wanted != "auto":
        return MicroBatches(
            wanted, batch
        ), f"micro-batch of {min(wanted, batch)} of {batch} sequences: --micro-batch {wanted}"
    if logits_bytes and (fit := max(LOGITS_BYTES // logits_bytes, 1)) < batch:
        told = f"micro-batches of {fit} of {batch} sequences, so that their logits take 1 GiB at most"
        return MicroBatches(None if processes == 1 else fit, fit), told
    if processes == 1:
        return MicroBatches(
            None, batch
        ), f"micro-batch auto: all {batch} sequences at once, fewer where they do not fit"
    return MicroBatches(batch, batch), f"micro-batch auto: all {batch} sequences of each process at once"


def memory_told(error: Exception) -> str:
    """Return what torch says of a memory that did not suffice, without the place in its source."""
    return str(error).partition("\n")[0].rpartition("] err == 0. ")[2].rstrip(".")


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the memory of the device, or of the host, did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
