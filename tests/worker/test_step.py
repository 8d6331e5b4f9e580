"""One inner step: micro-batches, memory that does not suffice, precision, several optimizers."""

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.spec.sections import InnerSpec
from worker.errors import BoxError
from worker.inner.evaluation import evaluate
from worker.inner.loss import Loss, find_head, mean_loss
from worker.inner.micro_batch import MicroBatches, is_out_of_memory
from worker.inner.precision import cast_parameters, loss_scaler, precision_on, use_float8
from worker.inner.step import InnerStep

CPU = torch.device("cpu")
VOCABULARY = 11


class Small(nn.Module):
    """A language model of two layers. `fits` sequences fit into the memory; the passes in `fails_at` fail as well."""

    def __init__(self, fits: int = 99, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 6, _weight=torch.randn(VOCABULARY, 6, generator=generator))
        self.linear = nn.Linear(6, VOCABULARY, bias=False)
        nn.init.normal_(self.linear.weight, generator=generator)
        self.fits, self.error = fits, error
        self.passes: list[int] = []
        self.fails_at: set[int] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes.append(len(tokens))
        if len(tokens) > self.fits or len(self.passes) in self.fails_at:
            raise self.error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.linear(self.embedding(tokens))


def batch(rows: int = 8) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(1))


def step_of(model: nn.Module, wanted: int | None, at_most: int = 8, **options: Any) -> InnerStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return InnerStep(Loss(model), [optimizer], MicroBatches(wanted, at_most), inner=InnerSpec(), **options)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_the_gradient_is_the_batch_s_whatever_the_split(size: int) -> None:
    """Also where the last micro-batch is smaller than the others: its tokens count as much as theirs."""
    whole, split = Small(), Small()
    expected = step_of(whole, 8).gradient(batch())
    loss = step_of(split, size).gradient(batch())
    assert sum(split.passes) == 8
    assert max(split.passes) == size
    torch.testing.assert_close(loss, expected)
    for one, other in zip(gradients(split), gradients(whole), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wanted", [None, 8, 100])
def test_a_whole_batch_is_what_it_was_bit_for_bit(wanted: int | None) -> None:
    plain, model = Small(), Small()
    loss = mean_loss(plain, batch())
    loss.backward()
    assert torch.equal(step_of(model, wanted).gradient(batch()), loss)
    assert model.passes == [8]
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_auto_halves_until_it_fits_and_counts_nothing_twice() -> None:
    """What the failed attempts had accumulated is gone, and the size is remembered."""
    model, known = Small(fits=3), Small()
    step = step_of(model, None)
    loss = step.gradient(batch())
    assert model.passes == [8, 4, 2, 2, 2, 2]
    assert torch.equal(loss, step_of(known, 2).gradient(batch()))
    assert all(map(torch.equal, gradients(model), gradients(known)))
    step.apply()
    step.gradient(batch())
    assert model.passes[6:] == [2, 2, 2, 2]


def test_memory_that_fails_in_the_middle_of_a_batch() -> None:
    """As where others take memory of the same device: the micro-batches done so far are dropped and done again."""
    model, known = Small(), Small()
    model.fails_at = {3}
    loss = step_of(model, None, at_most=2).gradient(batch())
    assert model.passes == [2, 2, 2] + [1] * 8
    assert torch.equal(loss, step_of(known, 1).gradient(batch()))
    assert all(map(torch.equal, gradients(model), gradients(known)))


def test_what_cannot_be_smaller_is_told() -> None:
    with pytest.raises(BoxError, match="--micro-batch 4 .*CUDA out of memory.*auto"):
        step_of(Small(fits=3), 4).gradient(batch())
    with pytest.raises(BoxError, match="not even one sequence fits.*--activation-checkpointing"):
        step_of(Small(fits=0), None).gradient(batch())
    with pytest.raises(BoxError, match=r"not even one sequence fits.*Try --device cpu\."), torch.no_grad():
        MicroBatches(None, 4).over(batch(), lambda parts: [Small(fits=0)(part) for part in parts])


def test_an_optimizer_whose_state_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No micro-batch helps there, nor does starting again, which the exit code of an unexpected fault asks for."""

    def step(self: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = Small()
    inner = step_of(model, None)
    inner.gradient(batch())
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(BoxError, match="inner optimizer's step .*CUDA out of memory"):
        inner.apply()


def test_a_sync_that_does_not_fit_is_told_as_what_it_is() -> None:
    """It runs within the step, as a hook of the optimizer, which was blamed for it."""

    def sync(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inner = InnerStep(Loss(model), [optimizer], MicroBatches(None, 8), inner=InnerSpec())
    optimizer.register_step_post_hook(sync)
    inner.gradient(batch())
    with pytest.raises(BoxError, match="the sync .*CUDA out of memory"):
        inner.apply()


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    model = Small(fits=4)
    model.error = type("Other", (RuntimeError,), {"__str__": lambda _: "mat1 and mat2 shapes cannot be multiplied"})
    with pytest.raises(RuntimeError, match="shapes"):
        step_of(model, None).gradient(batch())
    assert model.passes == [8]


class HeldOut:
    """Held-out batches of the sizes 8 and 3."""

    bytes_per_token = None

    def held_out_batches(self, max_tokens: int) -> list[Tensor]:
        return [batch(8), batch(3)]


def test_the_held_out_loss_survives_a_lack_of_memory_as_well() -> None:
    """It is measured first, before any inner step could have found out what fits."""
    model, data = Small(fits=5), HeldOut()
    sizes = MicroBatches(None, 8)
    report = evaluate(model, data, 44, CPU, Loss(model), sizes)  # type: ignore[arg-type]
    assert model.passes == [8, 4, 4, 3]
    assert report.tokens == 44
    assert report.loss == pytest.approx(evaluate(Small(), data, 44, CPU).loss)  # type: ignore[arg-type]


# --- precision ----------------------------------------------------------------------------------------------------


def test_float8_is_refused_by_name_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--precision float8 needs a GPU .* the device is cpu; use bf16"):
        precision_on(CPU, "float8")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"the device is cuda \(NVIDIA A100\); use bf16"):
        precision_on(cuda, "float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert [precision_on(cuda, "float8", held) for held in ("fp32", "bf16")] == ["float8", "float8"]
    with pytest.raises(ValueError, match=r"a frozen model in 4 bits \(nf4\) needs --precision bf16, not float8"):
        precision_on(cuda, "float8", base="nf4")


def test_without_torchao_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(BoxError, match=r"float8 needs torchao.* pip install 'outerstep\[float8\]'"):
        use_float8(nn.Linear(16, 16))


def test_linear_layers_in_float8_train_like_the_others() -> None:
    """As if the device had float8: close to bf16, with the same parameters, and the head as it was."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install 'outerstep[float8]'")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(LlamaForCausalLM(config))
    plain, model = models
    before = {name: id(each) for name, each in model.named_parameters()}
    assert use_float8(model, emulate=True) == 2 * 4, "of each layer all but the three whose 72 is no multiple of 16"
    assert {name: id(each) for name, each in model.named_parameters()} == before
    assert type(model.get_submodule("lm_head")) is nn.Linear
    batch = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(1))
    losses = []
    for each in models:
        optimizer, loss_of = torch.optim.AdamW(each.parameters(), lr=3e-3), Loss(each, "bf16", find_head(each))
        for _ in range(20):
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < 3.0, "it was 4.2 at first"
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert not torch.equal(next(plain.parameters()), next(model.parameters()))


def test_the_device_s_own_precision() -> None:
    cuda = torch.device("cuda")
    assert precision_on(cuda) == "bf16"
    assert precision_on(CPU) == "fp32"
    assert precision_on(CPU, None, "bf16") == "bf16"
    assert precision_on(cuda, "tf32") == "tf32"
    with pytest.raises(ValueError, match="--precision tf32 .*the device is cpu"):
        precision_on(CPU, "tf32")
    with pytest.raises(ValueError, match="--param-dtype bf16 needs --precision bf16, not fp16"):
        precision_on(CPU, "fp16", "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(precision: Any) -> None:
    """The products are of the precision, the loss is fp32 and close to that of fp32."""
    model, seen = Small(), []
    model.linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loss = Loss(model, precision)(batch())
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(mean_loss(Small(), batch()).item(), rel=2e-2)


def test_an_fp16_step_is_the_step() -> None:
    """Scaled and unscaled by a power of two: the gradient that arrives is that of the same arithmetic without."""
    scaled, plain = Small(), Small()
    scaler = loss_scaler("fp16", CPU)
    one, other = step_of(scaled, 3, scaler=scaler), step_of(plain, 3)
    for number in range(3):
        torch.testing.assert_close(one.gradient(batch()), other.gradient(batch()), msg=f"step {number}")
        one.apply()
        other.apply()
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_that_is_not_finite_is_dropped_by_all_optimizers() -> None:
    """One of them saw an infinity and would have skipped; the other would have gone on with what clipping had made of
    its gradient. And a fused optimizer skips in silence, so that the step would have counted."""
    model, stepped = Small(), []
    optimizers = [
        torch.optim.AdamW(model.embedding.parameters(), lr=0.1, fused=True),
        torch.optim.SGD(model.linear.parameters(), lr=0.1),
    ]
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    scaler = loss_scaler("fp16", CPU)
    assert scaler is not None
    step = InnerStep(Loss(model), optimizers, MicroBatches(None, 8), inner=InnerSpec(), scaler=scaler)
    step.gradient(batch())
    step.apply()
    assert len(stepped) == 2
    before, scale = [parameter.clone() for parameter in model.parameters()], scaler.get_scale()
    step.gradient(batch())
    assert model.embedding.weight.grad is not None
    model.embedding.weight.grad[0, 0] = math.inf
    step.apply()
    assert len(stepped) == 2
    assert all(map(torch.equal, model.parameters(), before))
    assert scaler.get_scale() == scale / 2
    step.gradient(batch())
    step.apply()
    assert len(stepped) == 4


@pytest.mark.parametrize(("bytes_per_token", "told"), [(None, None), (0.0, None), (1e-9, None), (2.5, 110)])
def test_tokens_of_no_text_have_no_bits_per_byte(bytes_per_token: float | None, told: int | None) -> None:
    """An index may say so, of documents that are all empty: a message of 0 bytes, which is none, ended the worker."""
    data: Any = HeldOut()
    data.bytes_per_token = bytes_per_token
    assert evaluate(Small(), data, 44, CPU).bytes == told


def test_parameters_in_bf16_and_buffers_as_they_were() -> None:
    model = Small()
    model.register_buffer("table", torch.arange(3.0))
    cast_parameters(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.table.dtype == torch.float32
