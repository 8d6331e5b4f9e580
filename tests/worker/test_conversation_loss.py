"""The loss of conversations: that of each by itself, however they are packed, padded and split."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from outerstep.compare import losses
from protocol.spec.sections import InnerSpec
from tests.support.conversations import write_conversations
from tests.support.tokenizers import write_chat_tokenizer
from tests.worker.test_conversations import spec
from worker.box import set_up
from worker.data.open_training_set import open_training_set
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.training_set import TrainingSet
from worker.errors import ModelError
from worker.inner.evaluation import evaluate
from worker.inner.loss import Loss, check_packing, find_head
from worker.inner.micro_batch import MicroBatches
from worker.inner.step import InnerStep
from worker.settings import BoxSettings

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


@pytest.mark.slow
def test_a_box_trains_on_conversations(source: Path) -> None:
    run = spec(source, source.parent, "holdout = 0.2", length=160, batch=4)
    box = set_up(run, BoxSettings(), CPU)
    assert box.evaluate is not None
    before = box.evaluate()
    batch = box.data.unit(0)
    first = float(box.step.gradient(batch))
    for _ in range(20):
        box.step.apply()
        last = float(box.step.gradient(batch))
    assert last < first / 2
    assert box.evaluate().loss < before.loss
    assert before.tokens == box.data.held_out_tokens
    assert json.loads(box.data.summary.model_dump_json())["units"] == box.data.units_per_epoch


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
