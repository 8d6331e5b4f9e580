"""Optimizers for little memory: the codes of moments, stochastic rounding, exact resumption, and how they train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from protocol.spec.run import parse_spec
from worker.box import moments, set_up
from worker.inner.compact import BLOCK, OCTAVES, Compact, decoded, encoded, rounded_stochastically
from worker.settings import BoxSettings
from worker.state.optimizer_state import load_local_state, local_state

CPU = torch.device("cpu")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
ON_DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
SPEC = """
name = "r"
seed = {seed}
model.preset = "tiny"
[data]
source = "python-stdlib"
sequence_length = 64
[inner]
optimizer = "{optimizer}"
batch_size = 8
learning_rate = 2e-3
[sync]
wait = "always"
rounds = 1
inner_steps = {steps}
"""


@pytest.mark.parametrize("signed", [True, False])
def test_the_error_of_8_bits_is_bounded_block_by_block(signed: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(3 * BLOCK + 7) * torch.logspace(-6, 3, 3 * BLOCK + 7)
    values = values if signed else values.square()
    codes, scale = encoded(values, signed=signed)
    assert (codes.dtype, codes.shape, scale.shape) == (torch.int8 if signed else torch.uint8, values.shape, (4,))
    found = decoded(codes, scale)
    per_value = scale.repeat_interleave(BLOCK)[: len(values)]
    if signed:
        assert bool(((found - values).abs() <= per_value / 254 * 1.001).all())
    else:
        seen = values > per_value * 2.0 ** (-OCTAVES * 254 / 255)  # what the least code but 0 stands for
        ratio = (found / values)[seen].log2().abs()
        assert ratio.max() <= OCTAVES / 255 / 2 * 1.001, "half a step of the logarithm"
        assert bool((found > 0).all()), "nothing becomes 0, by which the step would be divided"


def test_zeros_stay_zeros() -> None:
    for signed in (True, False):
        assert not decoded(*encoded(torch.zeros(BLOCK + 1), signed=signed)).any()


def test_stochastic_rounding_is_right_on_average_and_exact_where_bf16_is() -> None:
    torch.manual_seed(0)
    value = 1 + 2.0**-10  # an eighth of the way from 1 to the next value in bf16
    rounded = rounded_stochastically(torch.full((80_000,), value))
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(float((rounded > 1).float().mean()) - 1 / 8) < 0.01
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf")])
    assert torch.equal(rounded_stochastically(exact), exact.bfloat16())
    assert bool(rounded_stochastically(torch.tensor([float("nan")])).isnan())


def test_updates_that_bf16_would_lose_add_up() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = Compact(SGD([parameter], lr=1e-4), "bf16")
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert abs(float(parameter.detach().float().mean()) - 0.99) < 1e-3, (
        "each is 0.0001, and the next value below 1 is 0.996"
    )


def _likes(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [
        AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
        SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
        Muon([each for each in parameters if each.ndim == 2], lr=1e-2, weight_decay=0.1, nesterov=False),
    ]


@ON_DEVICES
@pytest.mark.parametrize("which", range(3), ids=["adamw", "sgd", "muon"])
def test_in_fp32_they_are_the_optimizers_of_torch(which: int, device: str) -> None:
    shapes = [(40, 30), (7,)]
    one, other = ([nn.Parameter(torch.ones(shape, device=device)) for shape in shapes] for _ in range(2))
    plain, compact = _likes(one)[which], Compact(_likes(other)[which], "fp32")
    torch.manual_seed(0)
    for _ in range(5):
        for a, b in zip(one, other, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        plain.step()
        compact.step()
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@ON_DEVICES
@pytest.mark.parametrize("which", range(3), ids=["adamw", "sgd", "muon"])
@pytest.mark.parametrize("held", ["bf16", "8bit"])
def test_a_saved_state_resumes_exactly(which: int, held: Any, device: str, tmp_path: Path) -> None:
    def steps(parameters: list[nn.Parameter], optimizer: Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            for each in parameters:
                each.grad = torch.randn_like(each)
            optimizer.step()

    one = [nn.Parameter(torch.ones(40, 30, dtype=torch.bfloat16, device=device))]
    undisturbed = Compact(_likes(one)[which], held)
    steps(one, undisturbed, 0, 3)
    torch.save((undisturbed.state_dict(), one), tmp_path / "saved")
    steps(one, undisturbed, 3, 6)

    state, other = torch.load(tmp_path / "saved", weights_only=False)
    resumed = Compact(_likes(other)[which], held)
    resumed.load_state_dict(state)
    steps(other, resumed, 3, 6)
    assert torch.equal(one[0], other[0])
    for name, value in undisturbed.state[one[0]].items():
        assert torch.equal(value, resumed.state[other[0]][name])
        assert value.dtype is resumed.state[other[0]][name].dtype


def _loss(steps: int, seed: int = 0, optimizer: str = "adamw", **settings: Any) -> tuple[float, int]:
    """The held-out loss after training alone, and the bytes of parameters and moments per parameter."""
    spec = parse_spec(SPEC.format(steps=steps, seed=seed, optimizer=optimizer))
    box = set_up(spec, BoxSettings(device="cpu", **settings), CPU)
    torch.manual_seed(seed)
    for step in range(steps):
        box.schedule.set(step, 1.0)
        box.step.gradient(box.data.unit(step))
        box.step.apply()
    moments = (each for one in box.optimizers for state in one.state.values() for each in state.values())
    parameters = list(box.model.parameters())
    count = sum(each.numel() for each in parameters)
    total = sum(each.nbytes for each in (*parameters, *moments))
    assert box.evaluate is not None
    return box.evaluate().loss, round(total / count)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "settings",
    [{"optimizer_state": "8bit"}, {"param_dtype": "bf16"}, {"param_dtype": "bf16", "optimizer_state": "8bit"}],
    ids=["8-bit", "bf16", "both"],
)
def test_the_loss_is_that_of_fp32(optimizer: str, settings: dict[str, Any]) -> None:
    for seed in (1, 2, 3):
        expected, _ = _loss(400, seed, optimizer)
        found, _ = _loss(400, seed, optimizer, **settings)
        assert abs(found - expected) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "bytes_each"),
    [({}, 12), ({"optimizer_state": "8bit"}, 6), ({"param_dtype": "bf16", "optimizer_state": "8bit"}, 4)],
    ids=["default", "8-bit", "both"],
)
def test_the_bytes_that_are_held(settings: dict[str, Any], bytes_each: int) -> None:
    assert _loss(2, **settings)[1] == bytes_each


@pytest.mark.parametrize("saved", ["8bit", None], ids=["from 8 bits", "to 8 bits"])
def test_codes_are_never_loaded_as_values(saved: Any) -> None:
    """torch would convert them without a word."""
    parameters = [nn.Parameter(torch.ones(300))]
    parameters[0].grad = torch.ones(300)
    one, other = (AdamW(parameters), Compact(AdamW(parameters), "8bit"))
    old, new = (other, one) if saved == "8bit" else (one, other)
    old.step()
    with pytest.raises(ValueError, match=f"held in {saved or 'fp32'}, .* --optimizer-state {saved or 'fp32'}"):
        load_local_state(new, local_state(old))


@pytest.mark.parametrize("which", range(3), ids=["adamw", "sgd", "muon"])
def test_moments_of_torch_go_on_in_bf16_and_back(which: int) -> None:
    parameters = [nn.Parameter(torch.ones(20, 30, dtype=torch.bfloat16))]
    parameters[0].grad = torch.full_like(parameters[0], 0.5)
    plain, compact, back = (
        _likes(parameters)[which],
        Compact(_likes(parameters)[which], "bf16"),
        _likes(parameters)[which],
    )
    plain.step()
    load_local_state(compact, local_state(plain))
    name = "exp_avg" if which == 0 else "momentum_buffer"
    assert torch.equal(compact.state[parameters[0]][name], plain.state[parameters[0]][name].flatten())
    compact.step()
    load_local_state(back, local_state(compact))
    back.step()
    assert back.state[parameters[0]][name].shape == parameters[0].shape


def test_bf16_parameters_of_the_user_s_optimizer_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    spec = parse_spec(SPEC.format(steps=1, seed=0, optimizer="adamw").replace('"adamw"', '"torch.optim:AdamW"'))
    assert moments(spec, BoxSettings(param_dtype="bf16"), None) is None
    assert "loses small updates" in caplog.text
    plain = parse_spec(SPEC.format(steps=1, seed=0, optimizer="adamw"))
    assert moments(plain, BoxSettings(param_dtype="bf16"), "ddp") == "bf16"
