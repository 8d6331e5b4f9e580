"""What a worker tells of its device: model FLOPs utilisation and memory."""

import math

import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from worker.accounts.machine import DeviceUse, peak_flops
from worker.inner.execution import ATTENTION, flops_per_token

CPU = torch.device("cpu")
LAYERS, WIDTH, MIDDLE, VOCABULARY, LENGTH = 3, 32, 48, 64, 16


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.train()


def test_flops_are_those_of_palm_s_formula() -> None:
    """6 N for the parameters that are multiplied with, and 12 · layers · width · length for the attention."""
    model = llama()
    multiplied = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE) + VOCABULARY * WIDTH
    expected = 6 * multiplied + 12 * LAYERS * WIDTH * LENGTH
    counted = flops_per_token(model, LENGTH, "fp32", CPU)
    assert counted is not None
    assert counted == pytest.approx(expected, rel=0.02)  # and the rotations' frequencies, which are a product as well
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_take_no_gradient_s_flops() -> None:
    model = llama()
    whole = flops_per_token(model, LENGTH, "fp32", CPU)
    for parameter in model.get_submodule("model.layers.0").parameters():
        parameter.requires_grad = False
    part = flops_per_token(model, LENGTH, "fp32", CPU)
    assert whole is not None
    assert part == pytest.approx(whole - 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE), rel=1e-6)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_a_gpu_counts_all_heads_of_the_queries(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.13 refused models in which they share keys and values, so a worker could not start."""

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    shape, shared = (2, 8, 16, 4), (2, 2, 16, 4)
    query, key = torch.zeros(shape, device="meta"), torch.zeros(shared, device="meta")
    scores = 2 * math.prod(shape) * 16
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
    for each in (forward, backward):
        monkeypatch.setitem(flop_counter.flop_registry, each, refuse)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        counted = counter.flop_registry
    assert counted[forward](query, key, key, 0.0, out_val=query) == 2 * scores
    assert counted[backward](query, query, key, key, out_val=query) == 5 * scores


class Exhausted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_memory_for_one_sequence_nothing_is_counted() -> None:
    assert flops_per_token(Exhausted(), LENGTH, "fp32", CPU) is None


class Uncounted(Exhausted):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")


def test_what_torch_cannot_count_is_told_and_ends_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    assert flops_per_token(Uncounted(), LENGTH, "fp32", CPU) is None
    assert "so the MFU is not reported: sdpa_flop_count: query/key/value shapes" in caplog.text


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA L40S", "fp32", 91.6),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_peaks(name: str, precision: str, tera: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tera * 1e12)


def test_without_either_figure_there_is_no_utilisation() -> None:
    assert DeviceUse(CPU, 100.0, None).utilisation(5.0) is None
    assert DeviceUse(CPU, None, 1000.0).utilisation(5.0) is None
    assert DeviceUse(CPU, 100.0, 1000.0).utilisation(5.0) == 0.5
