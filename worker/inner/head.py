"""The cross-entropy of a large vocabulary, without the logits of all tokens in memory at once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

_PROBE_TOKENS = 2  # as short as any model's context is


def summed_cross_entropy(hidden: Tensor, linear: nn.Linear, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies in nats, in fp32, of hidden states [tokens, width] and int64[tokens]."""
    return functional.cross_entropy(linear(hidden).float(), targets, reduction="sum")


class Head(NamedTuple):
    """A language model cut in two: `body(tokens).last_hidden_state` is what `linear` makes logits of.

    `compiled`: so are the body and the cross-entropy, each for itself.
    """

    body: nn.Module
    linear: nn.Linear
    cross_entropy: Callable[[Tensor, nn.Linear, Tensor], Tensor] = summed_cross_entropy
    compiled: bool = False


def find_head(model: nn.Module) -> Head | None:
    """Return the model's two parts; None where its logits are anything else than a linear layer on its last hidden
    state, as where they are scaled or capped. That is found out by a look at a few logits."""
    unwrapped = getattr(model, "get_base_model", None)  # of peft, around the model itself
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
    """Return the mean cross-entropy in nats, a scalar in fp32, of hidden states [tokens, width] and int64[tokens].

    Of more than `chunk_tokens` tokens only so many logits are in memory at a time; the backward pass makes them again.
    """
    if len(targets) <= chunk_tokens:
        return head.cross_entropy(hidden, head.linear, targets) / len(targets)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for states, wanted in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        total = total + checkpoint(head.cross_entropy, states, head.linear, wanted, use_reentrant=False)
    return total / len(targets)
