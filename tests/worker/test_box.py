"""What a box's settings make of a run: micro-batches, checkpointing, compiling, and what is told of the device."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from protocol.spec.run import RunSpec, parse_spec
from protocol.spec.sections import InnerSpec
from tests.support.text import write_chapters
from worker import box as box_module
from worker.box import Box, set_up
from worker.errors import BoxError, ModelError
from worker.inner import execution as compiling
from worker.inner import micro_batch
from worker.inner.data_parallel import choose_mode
from worker.inner.execution import checkpoint_activations
from worker.inner.loss import find_head, mean_loss
from worker.inner.micro_batch import choose_micro_batch
from worker.inner.schedules import learning_rate
from worker.ranks import Ranks
from worker.settings import BoxSettings
from worker.starting import choose_device, start, why_device
from worker.state.parameters import tensor_specs

CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    text = write_chapters(tmp_path / "text", chapters=4)
    return parse_spec(f"""
name = "text"
[model]
preset = "tiny"
[data]
source = "{text}"
sequence_length = 16
holdout = 0.1
[inner]
optimizer = "adamw"
batch_size = 2
learning_rate = 3e-3
warmup_steps = 2
[sync]
wait = "always"
rounds = {STEPS}
inner_steps = 1
[evaluation]
max_tokens = 64
""")


def train(box: Box) -> list[float]:
    """Take the run's inner steps; the learning rate of each."""
    box.model.train()
    rates = []
    for number in range(STEPS):
        box.schedule.set(number)
        rates.append(box.optimizers[-1].param_groups[0]["lr"])
        batch = box.data.unit(number)
        box.step.gradient(batch, box.step.targets(batch))
        box.step.apply()
    return rates


def test_inner_steps_are_those_of_a_plain_training_loop(spec: RunSpec) -> None:
    """Written out: the same batches, learning rates and clipping."""
    box = set_up(spec, BoxSettings(device="cpu"), CPU)
    plain = set_up(spec, BoxSettings(device="cpu"), CPU)
    optimizer = torch.optim.AdamW(plain.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for number in range(STEPS):
        optimizer.param_groups[0]["lr"] = learning_rate(spec, number, spec.inner.learning_rate)
        mean_loss(plain.model, plain.data.unit(number)).backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    train(box)
    assert all(map(torch.equal, box.model.parameters(), plain.model.parameters()))


def own_optimizer(model: nn.Module, inner: InnerSpec) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_the_schedule_scales_the_learning_rate_of_an_optimizer_of_one_s_own(spec: RunSpec) -> None:
    inner = spec.inner.model_copy(update={"optimizer": f"{__name__}:own_optimizer"})
    box = set_up(spec.model_copy(update={"inner": inner}), BoxSettings(device="cpu"), CPU)
    assert train(box)[0] == 0.25, "half of its own peak, of two warmup steps the first"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"precision": "fp16"}, {"precision": "bf16"}, {"param_dtype": "bf16"}])
def test_every_precision_learns(spec: RunSpec, changes: dict[str, Any]) -> None:
    box = set_up(spec, BoxSettings(device="cpu", **changes), CPU)
    assert box.evaluate is not None
    before = box.evaluate().loss
    train(box)
    assert box.evaluate().loss < before


def test_a_held_out_loss_that_is_not_a_number_is_told(spec: RunSpec) -> None:
    """It was an unexpected fault, which says that starting again would help."""
    box = set_up(spec, BoxSettings(device="cpu"), CPU)
    assert box.evaluate is not None
    with torch.no_grad():
        next(box.model.parameters()).fill_(float("nan"))
    with pytest.raises(ModelError, match="the held-out loss is nan: the model's parameters are not finite"):
        box.evaluate()


def gradient_of(spec: Any, **changes: Any) -> tuple[Tensor, list[Tensor]]:
    box = set_up(spec, BoxSettings(device="cpu", **changes), CPU)
    box.model.train()
    loss = box.step.gradient(box.data.unit(0))
    return loss, [parameter.grad for parameter in box.model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("changes", [{"micro_batch": 1}, {"activation_checkpointing": True}])
def test_the_gradient_is_the_same(spec: Any, changes: dict[str, Any]) -> None:
    loss, gradients = gradient_of(spec)
    other_loss, others = gradient_of(spec, **changes)
    torch.testing.assert_close(other_loss, loss)
    for one, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("device", "size", "changes", "told"),
    [
        ("cpu", 3, {}, "the run's batch of 2 sequences cannot be divided by 3 processes"),
        ("cpu", 2, {"parallel": "fsdp", "compile": True}, "--compile .* sharded"),
        ("cpu", 2, {"parallel": "fsdp", "precision": "fp16"}, "--precision fp16 .* sharded"),
        ("cpu", 2, {"parallel": "fsdp", "optimizer_state": "8bit"}, "sharded, .* --optimizer-state"),
        (
            "cpu",
            1,
            {"offload": True},
            "--offload moves .* from a GPU to host memory, and this worker trains on cpu: leave it out",
        ),
        ("cuda", 1, {"offload": True, "precision": "fp16"}, "--offload does not work with --precision fp16"),
        ("cuda", 1, {"offload": True, "compile": True}, "--offload does not work with --compile"),
        ("cuda", 2, {"offload": True}, "--offload is for one GPU: .* --parallel fsdp"),
    ],
)
def test_what_does_not_go_together_is_refused(
    spec: RunSpec, device: str, size: int, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(BoxError, match=told):
        set_up(spec, BoxSettings(**changes), torch.device(device), ranks=Ranks(size - 1, size))


@pytest.mark.parametrize(
    ("device", "changes", "told"),
    [
        ("cuda", {"offload": True}, "code that holds its moments as it does: leave out --offload"),
        ("cpu", {"optimizer_state": "8bit"}, "inner.optimizer is 'mine:adam'.*--optimizer-state"),
    ],
)
def test_an_optimizer_of_one_s_own_holds_its_moments_as_it_does(
    spec: RunSpec, device: str, changes: dict[str, Any], told: str
) -> None:
    own = spec.model_copy(update={"inner": spec.inner.model_copy(update={"optimizer": "mine:adam"})})
    with pytest.raises(BoxError, match=told):
        set_up(own, BoxSettings(**changes), torch.device(device))


def test_auto_on_a_cpu_bounds_the_logits_and_says_so(
    spec: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where they cannot be made a part at a time: too much memory of a CPU swaps, or kills, and tells nobody."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(micro_batch, "LOGITS_BYTES", 4 * 256 * 16)  # one sequence
    assert set_up(spec, BoxSettings(device="cpu"), CPU).micro_batches.size == 2
    assert "micro-batch auto: all 2 sequences at once" in caplog.text
    monkeypatch.setattr(box_module, "find_head", lambda model: None)
    assert set_up(spec, BoxSettings(device="cpu"), CPU).micro_batches.size == 1
    assert "micro-batches of 1 of 2 sequences" in caplog.text


def test_less_than_a_sequence_held_out_is_no_evaluation_and_is_told(
    spec: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mean over no tokens ended the worker at the first evaluation, and again after every restart."""
    (tmp_path / "short.txt").write_text("all work and no play. " * 7)  # 14 of its 147 bytes are held out
    box = set_up(spec.with_source(str(tmp_path / "short.txt")), BoxSettings(device="cpu"), CPU)
    assert box.evaluate is None
    assert "less than a sequence of 16 tokens: this worker measures no held-out loss" in caplog.text


def test_the_flops_are_counted_where_there_is_a_peak(spec: Any) -> None:
    assert set_up(spec, BoxSettings(device="cpu"), CPU).use.flops_per_token is None
    use = set_up(spec, BoxSettings(device="cpu", peak_flops=1e12, activation_checkpointing=True), CPU).use
    assert use.flops_per_token is not None
    assert use.peak_flops == 1e12
    assert 6 * 100_000 < use.flops_per_token < 12 * 139_584


# --- activation checkpointing -------------------------------------------------------------------------------------


class Layers(nn.Module):
    """A model of one's own, with a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def result_and_kept(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The sum of the outputs, and how many tensors are kept for the backward pass."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(x).sum()
    return result, len(kept)


def test_a_list_of_layers_is_checkpointed() -> None:
    """The names of the parameters stay, which the run's workers compare."""
    torch.manual_seed(0)
    plain, model = Layers(), Layers()
    model.load_state_dict(plain.state_dict())
    before = tensor_specs(model)
    checkpoint_activations(model)
    assert tensor_specs(model) == before
    x = torch.randn(2, 4)
    loss, kept = result_and_kept(model, x)
    expected, kept_by_plain = result_and_kept(plain, x)
    assert kept < kept_by_plain
    loss.backward()
    expected.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_model_without_layers_cannot_be_checkpointed() -> None:
    with pytest.raises(BoxError, match=r"Linear has no torch.nn.ModuleList"):
        checkpoint_activations(nn.Linear(2, 2))


# --- torch.compile ------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("plain_head", [True, False])
def test_a_compiled_model_is_the_same_model(spec: Any, monkeypatch: pytest.MonkeyPatch, plain_head: bool) -> None:
    """It keeps its names, is evaluated as it was written, and its gradient is close to that of the uncompiled one.
    (Traced only: what a compiler makes of it takes minutes here.)"""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="eager"))
    monkeypatch.setattr(box_module, "find_head", find_head if plain_head else lambda model: None)
    plain = set_up(spec, BoxSettings(device="cpu"), CPU)
    box = set_up(spec, BoxSettings(device="cpu", compile=True), CPU)
    assert tensor_specs(box.model) == tensor_specs(plain.model)
    assert box.evaluate is not None
    assert plain.evaluate is not None
    assert box.evaluate().loss == pytest.approx(plain.evaluate().loss, rel=1e-6)
    counted = counters["stats"]["unique_graphs"]
    torch.testing.assert_close(box.step.gradient(box.data.unit(0)), plain.step.gradient(plain.data.unit(0)))
    assert counters["stats"]["unique_graphs"] > counted
    names = [name for name, _ in box.model.named_parameters()]
    assert not any("_orig_mod" in name for name in names)


def test_a_machine_that_cannot_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(function: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nand a long story")

    monkeypatch.setattr(torch, "compile", compile_)
    with pytest.raises(BoxError, match=r"--compile: .*\(RuntimeError: No working C\+\+ compiler found\)"):
        compiling.compile_model(nn.Linear(2, 2), None, CPU)


# --- what a worker decides for its box, with the reason ------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "wanted", "mode", "why"),
    [
        (20e9, "auto", "ddp", "16.0 GB of the 20.0 GB"),
        (15e9, "auto", "fsdp", "16.0 GB of the 15.0 GB"),
        (None, "auto", "ddp", "without a GPU"),
        (20e9, "fsdp", "fsdp", "--parallel fsdp"),
    ],
)
def test_the_mode(budget: float | None, wanted: Any, mode: str, why: str) -> None:
    chosen, reason = choose_mode(10**9, budget, wanted)
    assert chosen == mode
    assert reason.startswith(f"mode {mode}: ")
    assert why in reason


@pytest.mark.parametrize(
    ("given", "size", "why"),
    [
        ((4, 16), 4, "4 of 16 sequences"),
        ((64, 16), 64, "16 of 16 sequences: --micro-batch 64"),
        (("auto", 16), 16, "all 16 sequences at once"),
        (("auto", 16, 2), 16, "all 16 sequences of each process"),
        (
            ("auto", 16, 1, 1 << 28),
            4,
            "4 of 16 sequences",
        ),
        (("auto", 16, 1, 1 << 20), 16, "all 16 sequences at once"),
    ],
)
def test_the_micro_batch(given: Any, size: int, why: str) -> None:
    micro_batches, reason = choose_micro_batch(*given)
    assert micro_batches.size == size
    assert why in reason


def test_the_device() -> None:
    assert start(BoxSettings(device="cpu")) == (torch.device("cpu"), "device cpu: --device cpu")
    assert why_device("auto", torch.device("cpu")) == (
        "device cpu: --device auto chooses the fastest available, as torch sees neither CUDA nor MPS here"
    )
    with pytest.raises(ValueError, match="device 'cudda' cannot be used: .* use auto, cpu, cuda, cuda:1 or mps"):
        choose_device("cudda")
