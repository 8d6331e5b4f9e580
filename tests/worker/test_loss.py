"""The loss: of conversations, that of each by itself, however they are packed, padded and split; and of a large vocabulary, with
few logits in memory at a time."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from outerstep.compare import losses
from protocol.spec.sections import InnerSpec
from tests.support.conversations import write_conversations
from tests.support.tokenizers import write_chat_tokenizer
from tests.worker.test_conversations import spec
from worker.data.open_training_set import open_training_set
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.training_set import TrainingSet
from worker.errors import ModelError
from worker.inner import loss as loss_module
from worker.inner.evaluation import evaluate
from worker.inner.loss import Head, Loss, check_packing, chunked_cross_entropy, find_head
from worker.inner.micro_batch import MicroBatches
from worker.inner.step import InnerStep

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_chat_tokenizer(tmp_path / "tokenizer")
    return write_conversations(tmp_path / "talk.jsonl")


def opened(source: Path, data: str = "", *, batch: int = 4) -> TrainingSet:
    return open_training_set(spec(source, source.parent, f"holdout = 0.2\n{data}", length=160, batch=batch))


def model_of(attention: str = "eager", model_type: str = "llama") -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=200,
        initializer_range=0.3,
        pad_token_id=0,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


def losses_one_by_one(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """The cross-entropy of every trained token, each conversation alone in its sequence."""
    found = []
    for row in batch:
        starts = [*(row & BEGINS).nonzero().flatten().tolist(), len(row)]
        for start, stop in pairwise(starts):
            ids, trained = row[start:stop] & IDS, (row[start + 1 : stop] & TRAINED) != 0
            logits = model(ids[None, :-1]).logits[0]
            found.append(functional.cross_entropy(logits, ids[1:], reduction="none")[trained])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("qwen3", "sdpa"), ("gemma2", "eager"), ("phi3", "sdpa")],
)
def test_packed_and_padded_losses_are_those_of_each_conversation(source: Path, model_type: str, attention: str) -> None:
    model = model_of(attention, model_type).eval()
    packed = opened(source).unit(0)
    assert ((packed & BEGINS) != 0).sum() > len(packed)
    expected = torch.cat(losses_one_by_one(model, packed)).mean()
    loss = Loss(model, "fp32", None, "packed")(packed)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    padded = opened(source, "packing = false").unit(0)
    expected = torch.cat(losses_one_by_one(model, padded)).mean()
    assert float(Loss(model, "fp32", None, "padded")(padded)) == pytest.approx(expected.item(), rel=1e-6)


def test_gradients_too(source: Path) -> None:
    one, other = model_of(), model_of()
    batch = opened(source).unit(3)
    torch.cat(losses_one_by_one(one, batch)).mean().backward()
    Loss(other, "fp32", None, "packed")(batch).backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)


def step_of(model: nn.Module, size: int, loss: Loss | None = None) -> InnerStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss or Loss(model, "fp32", None, "packed")
    return InnerStep(loss, [optimizer], MicroBatches(size, size), inner=InnerSpec())


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_count_by_their_trained_tokens(source: Path, size: int) -> None:
    one, other = model_of(), model_of()
    batch = opened(source).unit(0)
    assert len(set(((batch & TRAINED) != 0).sum(dim=1).tolist())) > 1
    expected = step_of(one, 4).gradient(batch)
    assert float(step_of(other, size).gradient(batch)) == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradients(other), gradients(one), rtol=1e-6, atol=1e-6)


def test_the_parts_of_several_processes_count_by_their_trained_tokens(source: Path) -> None:
    """Each process divides by the whole batch's trained tokens per process, so the average is the batch's."""
    whole, parts = model_of(), [model_of(), model_of()]
    batch = opened(source).unit(0)
    expected = step_of(whole, 4).gradient(batch)
    losses = []
    for rank, model in enumerate(parts):
        step = step_of(model, 4)
        losses.append(float(step.gradient(batch[rank::2], step.targets(batch) / 2)))
    assert sum(losses) / 2 == pytest.approx(expected.item(), rel=1e-6)
    mean = [(a + b) / 2 for a, b in zip(*map(gradients, parts), strict=True)]
    torch.testing.assert_close(mean, gradients(whole), rtol=1e-6, atol=1e-6)


def test_logits_in_chunks(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    batch = opened(source).unit(0)
    expected = Loss(model, "fp32", None, "packed")(batch)
    monkeypatch.setattr("worker.inner.loss.LOGITS_BYTES", 4 * 300 * 50)
    chunked = Loss(model, "fp32", find_head(model), "packed")(batch)
    assert chunked.item() == pytest.approx(expected.item(), rel=1e-6)


def test_nothing_to_train_on_is_no_gradient(source: Path) -> None:
    model = model_of()
    batch = opened(source).unit(0) & (IDS | BEGINS)
    loss = step_of(model, 4).gradient(batch)
    assert float(loss) == 0
    assert all(not each.any() for each in gradients(model))


def test_the_held_out_loss_is_over_trained_tokens(source: Path) -> None:
    model, data = model_of().eval(), opened(source)
    report = evaluate(model, data, 10**6, CPU, Loss(model, "fp32", None, "packed"), MicroBatches(1, 1))
    batches = list(data.held_out_batches(10**6))
    expected = torch.cat([loss for batch in batches for loss in losses_one_by_one(model, batch)])
    assert report.loss == pytest.approx(expected.mean().item(), rel=1e-6)
    assert report.tokens == len(expected) == data.held_out_tokens


# --- models that cannot ---------------------------------------------------------------------------------------------


class Blind(nn.Module):
    """Ignores positions: each token sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Any:
        return self.inner(tokens)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()

    def forward(self, tokens: Tensor) -> Any:
        return self.inner(tokens)


def test_a_model_that_mixes_conversations_is_rejected() -> None:
    check_packing(model_of())
    with pytest.raises(ModelError, match=r"Blind lets each see those before it: set data.packing = false"):
        check_packing(Blind())
    with pytest.raises(ModelError, match=r"position_ids, which Plain is not .* set data.packing = false"):
        check_packing(Plain())


@pytest.mark.parametrize("data", ["", "packing = false"])
def test_the_loss_by_conversation_adds_up_to_that_of_all(source: Path, data: str) -> None:
    opened_set, model = opened(source, data), model_of().eval()
    loss = Loss(model, conversations="padded" if data else "packed")
    report = evaluate(model, opened_set, 10**6, CPU, loss)
    documents = opened_set.held_out_documents(10**6)
    assert documents is not None
    batches = zip(opened_set.held_out_batches(10**6), documents, strict=True)
    of_each = losses(loss, batches, CPU, MicroBatches(None, 2))
    assert int(of_each.targets.sum()) == report.tokens
    assert of_each.mean == pytest.approx(report.loss, rel=1e-5)
    begins = sum(int((batch & BEGINS != 0).sum()) for batch in opened_set.held_out_batches(10**6))
    assert 1 < len(of_each.targets) <= begins


# --- a large vocabulary: few logits in memory at a time ------------------------------------------------------------


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


def small_model(kind: str, **changes: Any) -> nn.Module:
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
    plain, chunked = (small_model("llama", tie_word_embeddings=tied) for _ in range(2))
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
    model = small_model("llama")
    assert torch.equal(Loss(model, None, find_head(model))(batch()), Loss(model)(batch()))


def test_a_head_that_is_not_plain_is_left_alone() -> None:
    """These scale or cap their logits: the linear layer alone would give another loss, and say nothing."""
    assert find_head(small_model("llama")) is not None
    assert find_head(small_model("granite", logits_scaling=8.0)) is None
    assert find_head(small_model("gemma2", final_logit_softcapping=0.1)) is None
    assert find_head(nn.Linear(3, 3)) is None
