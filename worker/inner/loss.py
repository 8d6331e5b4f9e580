"""The loss of one batch, for large vocabularies without the logits of all its tokens in memory at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from worker.inner.precision import Precision, autocast, precision_on
from worker.models.building import logits_of

LOGITS_BYTES = 1 << 30  # of fp32 logits in memory at once; more are computed in chunks
_PROBE_TOKENS = 2  # fits into any model's context


def summed_cross_entropy(hidden: Tensor, linear: nn.Linear, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies in nats, a scalar in fp32.

    hidden   [tokens, width], the last hidden states
    targets  int64[tokens]
    """
    return functional.cross_entropy(linear(hidden).float(), targets, reduction="sum")


class Head(NamedTuple):
    """A language model in two parts: `linear` computes the logits from `body(tokens).last_hidden_state`.

    `compiled` is True if the body and the cross-entropy have been compiled, separately.
    """

    body: nn.Module
    linear: nn.Linear
    cross_entropy: Callable[[Tensor, nn.Linear, Tensor], Tensor] = summed_cross_entropy
    compiled: bool = False


def find_head(model: nn.Module) -> Head | None:
    """Return the model's two parts, or None if its logits are not exactly a linear layer applied to the last hidden
    state (some models scale or cap them). A forward pass over two tokens decides."""
    unwrapped = getattr(model, "get_base_model", None)  # peft wraps the model
    whole = model if unwrapped is None else unwrapped()
    if not isinstance(whole, PreTrainedModel):
        return None
    body, linear = whole.base_model, whole.get_output_embeddings()
    if type(linear) is not nn.Linear or body is whole:
        return None
    head = Head(body, linear)
    return head if _gives_the_same(model, head) else None


@torch.no_grad()
def _gives_the_same(model: nn.Module, head: Head) -> bool:
    was_training = model.training
    model.eval()
    tokens = torch.arange(_PROBE_TOKENS, device=head.linear.weight.device)[None] % head.linear.out_features
    hidden = getattr(head.body(tokens), "last_hidden_state", None)
    same = hidden is not None and torch.allclose(model(tokens).logits, head.linear(hidden), rtol=1e-3, atol=1e-5)
    model.train(was_training)
    return same


def chunked_cross_entropy(hidden: Tensor, head: Head, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar in fp32, with the logits of `chunk_tokens` tokens in memory at
    most. The backward pass computes them again.

    hidden   [tokens, width]
    targets  int64[tokens]
    """
    if len(targets) <= chunk_tokens:
        return head.cross_entropy(hidden, head.linear, targets) / len(targets)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for states, wanted in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        total = total + checkpoint(head.cross_entropy, states, head.linear, wanted, use_reentrant=False)
    return total / len(targets)


@dataclass(frozen=True)
class Loss:
    """The model's mean cross-entropy in nats per token.

    precision  None: the device's default
    head       if given, the logits of a large batch are computed in chunks
    """

    model: nn.Module
    precision: Precision | None = None
    head: Head | None = None

    def unsynchronised(self) -> AbstractContextManager[object]:
        """Return the context for every backward pass of a gradient except the last one."""
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
    """Return the mean cross-entropy in nats per token of int64[batch, length + 1], in default precision."""
    return Loss(model)(batch)
