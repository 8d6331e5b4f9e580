"""The loss of a large vocabulary: the same numbers, and few logits in memory at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from worker.inner import loss as loss_module
from worker.inner.loss import Head, Loss, chunked_cross_entropy, find_head

VOCABULARY, ROWS, LENGTH = 300, 4, 16
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def model_of(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **changes})
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_loss_and_gradient_with_few_logits(
    monkeypatch: pytest.MonkeyPatch, precision: Any, tied: bool
) -> None:
    plain, chunked = (model_of("llama", tie_word_embeddings=tied) for _ in range(2))
    expected = Loss(plain, precision)(batch())
    expected.backward()
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", 4 * VOCABULARY * 10)  # ten tokens, the last time fewer
    with Largest() as largest:
        loss = Loss(chunked, precision, find_head(chunked))(batch())
        loss.backward()
    assert largest.elements < ROWS * LENGTH * VOCABULARY // 2
    rtol, atol = (1e-5, 1e-7) if precision == "fp32" else (2e-2, 1e-3)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_of_a_part_of_the_targets_scaled(bias: bool, frozen: bool) -> None:
    """Some targets do not count, the last chunk is shorter, the loss is scaled, and the head may be frozen."""
    torch.manual_seed(0)
    linear = nn.Linear(8, VOCABULARY, bias=bias).requires_grad_(not frozen)
    hidden = torch.randn(53, 8, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (53,))
    targets[::3] = -100
    given = [hidden, *(each for each in linear.parameters() if not frozen)]
    expected = nn.functional.cross_entropy(linear(hidden), targets, reduction="sum") / 7 * 0.3
    found = chunked_cross_entropy(hidden, Head(nn.Identity(), linear), targets, 10, 7) * 0.3
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(hidden, Head(nn.Identity(), linear), targets, 10, 7) * 0.3, found)


def test_a_sum_over_many_tokens_does_not_exceed_the_range_of_fp16() -> None:
    """All of them have one target, and large states; a GradScaler would skip every step for ever."""
    linear, hidden = nn.Linear(8, 16, bias=False), torch.full((4096, 8), 40.0)
    with torch.autocast("cpu", torch.float16):
        loss = chunked_cross_entropy(
            hidden, Head(nn.Identity(), linear), torch.zeros(4096, dtype=torch.int64), 2048, 4096
        )
    loss.backward()
    assert linear.weight.grad is not None
    expected = torch.autograd.grad(nn.functional.cross_entropy(linear(hidden), torch.zeros(4096).long()), linear.weight)
    torch.testing.assert_close(linear.weight.grad, expected[0], rtol=1e-2, atol=1e-2)


def test_its_gradients_can_be_asked_for_only_once() -> None:
    """They are scaled in place; a second time would scale them again without a word."""
    hidden = torch.randn(30, 8, requires_grad=True)
    loss = chunked_cross_entropy(
        hidden, Head(nn.Identity(), nn.Linear(8, 9)), torch.zeros(30, dtype=torch.int64), 10, 1
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_few_logits_are_made_at_once_bit_for_bit() -> None:
    model = model_of("llama")
    assert torch.equal(Loss(model, None, find_head(model))(batch()), Loss(model)(batch()))


def test_a_head_that_is_not_plain_is_left_alone() -> None:
    """These scale or cap their logits: the linear layer alone would give another loss, and say nothing."""
    assert find_head(model_of("llama")) is not None
    assert find_head(model_of("granite", logits_scaling=8.0)) is None
    assert find_head(model_of("gemma2", final_logit_softcapping=0.1)) is None
    assert find_head(nn.Linear(3, 3)) is None
