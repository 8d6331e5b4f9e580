"""The loss of one batch."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from worker.inner.head import Head, chunked_cross_entropy
from worker.inner.precision import Precision, autocast, precision_on
from worker.models.building import logits_of

LOGITS_BYTES = 1 << 30  # in fp32; more than these are made a chunk at a time


@dataclass(frozen=True)
class Loss:
    """The mean cross-entropy, nats per token, by `model`. `precision`: None is the device's own. `head`: given, so that
    of many logits few are in memory at a time."""

    model: nn.Module
    precision: Precision | None = None
    head: Head | None = None

    def unsynchronised(self) -> AbstractContextManager[object]:
        """Return the context of a backward pass that is not the last one of its gradient."""
        return nullcontext()

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the mean over int64[batch, length + 1], a scalar in fp32."""
        tokens, targets = batch[:, :-1], batch[:, 1:].flatten()
        with autocast(self.precision or precision_on(batch.device), batch.device):
            if self.head is not None:
                chunk_tokens = max(LOGITS_BYTES // (4 * self.head.linear.out_features), 1)
                if self.head.compiled or tokens.numel() > chunk_tokens:
                    hidden = self.head.body(tokens).last_hidden_state.flatten(0, 1)
                    return chunked_cross_entropy(hidden, self.head, targets, chunk_tokens)
            logits = logits_of(self.model, tokens)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets)


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy, nats per token, of int64[batch, length + 1], in the device's own precision."""
    return Loss(model)(batch)
