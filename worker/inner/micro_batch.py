"""Micro-batches: how much of a batch goes through the model at once. The gradient is always that of the whole batch."""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor

from worker.errors import BoxError
from worker.inner.loss import LOGITS_BYTES

T = TypeVar("T")

# Out of memory without an OutOfMemoryError: raised by CUDA calls, cuBLAS and the CPU.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")

log = logging.getLogger(__name__)


class MicroBatches:
    """The size of micro-batches, in sequences.

    `size` is `wanted` if given. Otherwise it starts at `at_most` and is halved whenever memory runs out.
    """

    def __init__(self, wanted: int | None, at_most: int) -> None:
        self._searching = wanted is None
        self.size = at_most if wanted is None else wanted

    def over(
        self, batch: Tensor, act: Callable[[tuple[Tensor, ...]], T], undo: Callable[[], object] = lambda: None
    ) -> T:
        """Return `act` of the batch's micro-batches. If memory runs out, call `undo` and retry with smaller ones.

        Raises BoxError if they may not be smaller.
        """
        while True:
            try:
                return act(batch.split(self.size))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(min(self.size, len(batch)), error)
            # Outside the except block: the error's traceback kept the frames, and so the activations, alive.
            undo()
            if batch.device.type == "cuda":
                torch.cuda.empty_cache()

    def _halve(self, tried: int, error: RuntimeError) -> None:
        cause = memory_error_of(error)
        if not self._searching:
            raise BoxError(
                f"--micro-batch {self.size} does not fit into memory: {cause}. Use a smaller one, or auto if the "
                "worker has a single process."
            ) from error
        if tried == 1:
            trains = torch.is_grad_enabled()
            remedy = "--activation-checkpointing, --precision bf16 or --param-dtype bf16" if trains else "--device cpu"
            raise BoxError(f"not even one sequence fits into memory: {cause}. Try {remedy}.") from error
        self.size = (tried + 1) // 2
        log.warning("micro-batches of %d sequences do not fit into memory; using %d from now on", tried, self.size)


def choose_micro_batch(
    wanted: int | Literal["auto"], batch: int, processes: int = 1, logits_bytes: int | None = None
) -> tuple[MicroBatches, str]:
    """Return the micro-batches for the `batch` sequences of each process, and the reason in words.

    `auto` starts with the whole batch and shrinks when memory runs out. With several processes it cannot shrink: the
    one that ran out would leave the others waiting. On a CPU, using too much memory swaps or kills instead of raising,
    so there it starts with as many sequences as keep the logits within LOGITS_BYTES.

    logits_bytes  fp32 logits of one sequence, on a CPU; None elsewhere
    """
    if wanted != "auto":
        return MicroBatches(
            wanted, batch
        ), f"micro-batch of {min(wanted, batch)} of {batch} sequences: --micro-batch {wanted}"
    if logits_bytes and (fit := max(LOGITS_BYTES // logits_bytes, 1)) < batch:
        why = f"micro-batches of {fit} of {batch} sequences, so that their logits take at most 1 GiB"
        return MicroBatches(None if processes == 1 else fit, fit), why
    if processes == 1:
        return MicroBatches(None, batch), f"micro-batch auto: all {batch} sequences at once, fewer if they do not fit"
    return MicroBatches(batch, batch), f"micro-batch auto: all {batch} sequences of each process at once"


def memory_error_of(error: Exception) -> str:
    """Return torch's out-of-memory message without its source location."""
    return str(error).partition("\n")[0].rpartition("] err == 0. ")[2].rstrip(".")


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the device or the host ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
