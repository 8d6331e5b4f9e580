"""The loss of one batch, for large vocabularies without the logits of all its tokens in memory at once.

It is the mean over the targets. In a batch of conversations, whose tokens have marks (worker/data/tokens/marks.py),
these are the tokens that are trained on.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from protocol.spec.sections import DataSpec
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.errors import ModelError
from worker.inner.precision import Precision, autocast, precision_on
from worker.models.building import logits_of

LOGITS_BYTES = 1 << 30  # of fp32 logits in memory at once; more are computed in chunks
_PROBE_TOKENS = 2  # fits into any model's context
_FP16_ROOM = 64.0
_UNTRAINED = -100  # the target that torch's cross_entropy ignores

Conversations = Literal["packed", "padded"]


def summed_cross_entropy(hidden: Tensor, linear: nn.Linear, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies in nats, a scalar in fp32.

    hidden   [tokens, width], the last hidden states
    targets  int64[tokens]; _UNTRAINED: not in the sum
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


def chunked_cross_entropy(
    hidden: Tensor, head: Head, targets: Tensor, chunk_tokens: int, mean_over: Tensor | int
) -> Tensor:
    """Return the sum of the cross-entropies in nats divided by `mean_over`, a scalar in fp32, with the logits of
    `chunk_tokens` tokens in memory at most.

    hidden   [tokens, width]
    targets  int64[tokens]
    """
    if len(targets) <= chunk_tokens:
        return head.cross_entropy(hidden, head.linear, targets) / mean_over
    total: Tensor = _FusedCrossEntropy.apply(hidden, head.linear.weight, head.linear.bias, targets, chunk_tokens)
    return total / mean_over


class _FusedCrossEntropy(torch.autograd.Function):
    """The linear layer and the sum of the cross-entropies in one operation, chunk by chunk.

    The forward pass also computes the gradients of each chunk while its logits are there, for a loss whose gradient is
    1; the backward pass only scales them. So no logits are computed twice, as they would be with checkpoints.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_tokens: int
    ) -> Tensor:
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(each) if needed and each is not None else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(targets), chunk_tokens):
            states, wanted = hidden[start : start + chunk_tokens], targets[start : start + chunk_tokens]
            logits = functional.linear(states, weight, bias)
            dtype, values = logits.dtype, logits.float()
            del logits
            counts = wanted != _UNTRAINED
            index = torch.where(counts, wanted, 0)[:, None]
            highest = values.amax(dim=1, keepdim=True)
            hit = values.gather(1, index) - highest
            powers = values.sub_(highest).exp_()  # in place, as they are the largest tensor of a step
            sums = powers.sum(dim=1, keepdim=True)
            total += ((sums.log() - hit).squeeze(1) * counts).sum()
            if of_hidden is None and of_weight is None and of_bias is None:
                continue
            slope = powers.div_(sums)
            slope.scatter_add_(1, index, torch.full_like(sums, -1.0))
            slope = slope.mul_(counts[:, None]).to(dtype)
            if of_hidden is not None:
                of_hidden[start : start + chunk_tokens] = slope @ weight.to(dtype)
            if of_weight is not None:
                states = states.to(dtype)
                if dtype is torch.float16:  # whose range a sum over thousands of tokens can exceed
                    of_weight.add_(slope.t() @ (states / _FP16_ROOM), alpha=_FP16_ROOM)
                else:
                    of_weight += slope.t() @ states
            if of_bias is not None:
                of_bias += slope.sum(dim=0, dtype=torch.float32)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.used = False
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError("the gradients of a fused cross-entropy can be asked for only once")
        ctx.used = True
        scaled = (None if each is None else each.mul_(slope) for each in ctx.saved_tensors)  # in place: they are large
        return *scaled, None, None


class Inputs(NamedTuple):
    """A batch of conversations as a model takes it.

    tokens     int64[batch, length]
    targets    int64[batch, length]: the token after each one; -100, which torch's cross_entropy ignores, if it is not
               trained on
    positions  int64[batch, length]: of each token in its conversation. A model of transformers that gets them as
               `position_ids`, with `use_cache=False` and no attention mask, lets no token see another conversation
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor


def unpack(batch: Tensor) -> Inputs:
    """Return the inputs and targets of a batch of conversations, int64[batch, length + 1] with marks."""
    tokens, following = batch[:, :-1], batch[:, 1:]
    at = torch.arange(tokens.shape[1], device=batch.device).expand_as(tokens)
    return Inputs(
        tokens & IDS,
        torch.where((following & TRAINED) != 0, following & IDS, _UNTRAINED),
        at - torch.where((tokens & BEGINS) != 0, at, 0).cummax(dim=1).values,
    )


def conversations_in(data: DataSpec) -> Conversations | None:
    """Return how batches of this [data] have conversations; None if it is text."""
    if data.format == "text":
        return None
    return "packed" if data.packing else "padded"


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Raise ModelError unless the model keeps conversations in one sequence apart, given the positions of their
    tokens. A forward pass over two short ones decides."""
    was_training = model.training
    model.eval()
    count = 2 * _PROBE_TOKENS
    tokens = torch.arange(count, device=next(model.parameters()).device)[None]
    positions = tokens % _PROBE_TOKENS
    second = tokens[:, _PROBE_TOKENS:]
    try:
        together, alone = logits_of(model, tokens, positions), logits_of(model, second, positions[:, _PROBE_TOKENS:])
    except TypeError as error:
        raise ModelError(
            f"data.packing needs a model that is called with position_ids, which {type(model).__name__} is not "
            f"({error}): set data.packing = false"
        ) from error
    model.train(was_training)
    if not torch.allclose(together[:, _PROBE_TOKENS:], alone, rtol=1e-3, atol=1e-5):
        raise ModelError(
            f"with data.packing, conversations share a sequence, but {type(model).__name__} lets each see those before "
            "it: set data.packing = false"
        )


@dataclass(frozen=True)
class Loss:
    """The model's mean cross-entropy in nats per target.

    precision      None: the device's default
    head           if given, the logits of a large batch are computed in chunks
    conversations  None: batches have no marks, and every token after the first is a target. Otherwise whether sequences
                   have several conversations, which do not see each other, or one and padding
    """

    model: nn.Module
    precision: Precision | None = None
    head: Head | None = None
    conversations: Conversations | None = None

    def unsynchronised(self) -> AbstractContextManager[object]:
        """Return the context for every backward pass of a gradient except the last one."""
        return nullcontext()

    def targets(self, batch: Tensor) -> Tensor | int:
        """Return the number of targets in int64[batch, length + 1]; a scalar on the device for conversations."""
        return batch[:, 1:].numel() if self.conversations is None else self.counted(batch).sum()

    def counted(self, batch: Tensor) -> Tensor:
        """Return which tokens of int64[batch, length + 1], but the first of each, are targets: bool[batch, length]."""
        wanted = batch[:, 1:]
        return torch.ones_like(wanted, dtype=torch.bool) if self.conversations is None else (wanted & TRAINED) != 0

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the mean over the targets of int64[batch, length + 1], a scalar in fp32; 0 if there are none."""
        tokens, targets, positions = self._inputs(batch)
        mean_over, targets = self.targets(batch), targets.flatten()
        if isinstance(mean_over, Tensor):
            mean_over = mean_over.clamp(min=1)
        with autocast(self.precision or precision_on(batch.device), batch.device):
            if self.head is not None:
                chunk_tokens = max(LOGITS_BYTES // (4 * self.head.linear.out_features), 1)
                if self.head.compiled or tokens.numel() > chunk_tokens:
                    given = {} if positions is None else {"position_ids": positions}
                    hidden = self.head.body(tokens, **given).last_hidden_state.flatten(0, 1)
                    return chunked_cross_entropy(hidden, self.head, targets, chunk_tokens, mean_over)
            logits = logits_of(self.model, tokens, positions)
        if self.conversations is None:
            return functional.cross_entropy(logits.float().flatten(0, 1), targets)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum") / mean_over

    def of_each(self, batch: Tensor) -> Tensor:
        """Return the cross-entropy of each target of int64[batch, length + 1], float32[batch, length]; 0 for tokens
        that are no targets. All logits are in memory at once."""
        tokens, targets, positions = self._inputs(batch)
        with autocast(self.precision or precision_on(batch.device), batch.device):
            logits = logits_of(self.model, tokens, positions)
        each = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return each.view(targets.shape)

    def _inputs(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tokens, the targets, and the positions if they are not those of any sequence."""
        if self.conversations is None:
            return batch[:, :-1], batch[:, 1:], None
        tokens, targets, positions = unpack(batch)
        return tokens, targets, None if self.conversations == "padded" else positions


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token of int64[batch, length + 1], in default precision."""
    return Loss(model)(batch)
