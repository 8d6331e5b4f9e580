"""An inner step on a GPU: nothing waits for it, its memory may run out, and a compiler makes the same of the model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, masking_utils

from protocol.spec.sections import InnerSpec
from worker.accounts.machine import DeviceUse
from worker.inner import loss as loss_module
from worker.inner.execution import compile_model
from worker.inner.loss import Loss, find_head
from worker.inner.micro_batch import MicroBatches
from worker.inner.offload import HostGradients
from worker.inner.optimizers import build_inner_optimizers
from worker.inner.precision import Precision, loss_scaler
from worker.inner.step import InnerStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")

CUDA = torch.device("cuda")
VOCABULARY, LENGTH, ROWS = 8192, 256, 16


@pytest.fixture(autouse=True)
def all_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.set_sync_debug_mode("default")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.float().to(CUDA).train()


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(CUDA)


def step_of(model: nn.Module, wanted: int | None, precision: Precision = "bf16", head: Any = None) -> InnerStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss, sizes = Loss(model, precision, head), MicroBatches(wanted, ROWS)
    return InnerStep(loss, [optimizer], sizes, inner=InnerSpec(), scaler=loss_scaler(precision, CUDA))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_no_step_waits_for_the_device(precision: Precision, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for one wait in transformers: an uncompiled model reads whether its batch is packed sequences."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    model = llama()
    head = find_head(model)
    if compiled:
        head = compile_model(model, head, CUDA)
    step, tokens = step_of(model, 4, precision, head), batch()
    for _ in range(2):  # the first ones compile, and make the optimizer's state
        step.gradient(tokens)
        step.apply()
    torch.cuda.set_sync_debug_mode("error")
    step.gradient(tokens)
    step.apply()


@pytest.mark.parametrize("held", ["bf16", "8bit"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_no_step_with_small_moments_waits_for_the_device(optimizer: Any, held: Any) -> None:
    model = llama().bfloat16()
    optimizers = build_inner_optimizers(model, InnerSpec(optimizer=optimizer, learning_rate=1e-3), held)
    torch.cuda.synchronize()
    for _ in range(2):
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        for one in optimizers:
            one.step()
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    assert all(bool(each.isfinite().all()) for each in model.parameters())


def test_an_out_of_memory_of_its_own() -> None:
    """The allocator is held to half of what the whole batch takes."""
    model, known = llama(), llama()
    expected = step_of(known, 1)
    step_of(model, ROWS).gradient(batch())
    peak = DeviceUse(CUDA).peak_memory_bytes()
    assert peak is not None
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(peak / 2 / torch.cuda.get_device_properties(CUDA).total_memory)
    loss = step_of(model, None).gradient(batch())
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(loss, expected.gradient(batch()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("logits", [2048, 1 << 20], ids=["in chunks", "at once"])
def test_compiled_it_is_the_same_loss(monkeypatch: pytest.MonkeyPatch, logits: int) -> None:
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", 4 * VOCABULARY * logits)
    plain, model = llama(), llama()
    step = step_of(model, None, "bf16", compile_model(model, find_head(model), CUDA))
    torch.testing.assert_close(step.gradient(batch()), step_of(plain, None).gradient(batch()), rtol=1e-3, atol=1e-3)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() < 0.03 * other.grad.norm(), name


def test_fp16_learns() -> None:
    step, losses = step_of(llama(), 8, "fp16"), []
    for _ in range(20):
        losses.append(float(step.gradient(batch())))
        step.apply()
    assert losses[-1] < losses[0]


def test_offloaded_it_is_the_same_training_with_the_memory_of_the_parameters() -> None:
    """Moments in 8 bits, clipped, in micro-batches. Between steps the device holds nothing but the parameters."""
    inner = InnerSpec(optimizer="adamw", learning_rate=1e-3, clip_norm=1e-2)
    models = []
    for offloads in (False, True):
        model = llama().bfloat16()
        held = torch.cuda.memory_allocated()
        offloaded = HostGradients(model.parameters()) if offloads else None
        optimizers = build_inner_optimizers(model, inner, "8bit", offloaded)
        step = InnerStep(Loss(model, "bf16"), optimizers, MicroBatches(4, ROWS), inner=inner, offloaded=offloaded)
        for number in range(3):
            torch.manual_seed(number)
            step.gradient(batch())
            step.apply()
        models.append(model)
        if offloads:
            moments = [each for state in optimizers[0].state.values() for each in state.values()]
            assert {each.device.type for each in moments} == {"cpu"}
            assert all(each.is_pinned() for each in moments if each.numel() > 1)
            assert torch.cuda.memory_allocated() - held < 1 << 20
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
