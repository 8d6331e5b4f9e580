"""The outer step of tensors: the bits of the numpy one, and the arithmetic of torch.optim.SGD(nesterov=True)."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from protocol import outer_step as reference
from worker.outer_step import outer_step, step_on_device


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e20, 1e37])
@pytest.mark.parametrize(("learning_rate", "beta"), [(0.7, 0.9), (1.0, 0.8), (0.3, 0.0)])
@pytest.mark.parametrize("step", [outer_step, step_on_device])
def test_bit_identical_to_numpy(
    step: Callable[..., None], device: str, scale: float, learning_rate: float, beta: float
) -> None:
    rng = np.random.default_rng(1)
    n = 300_001
    theta, momentum = (rng.standard_normal(n).astype(np.float32) * np.float32(scale) for _ in range(2))
    ours = [torch.from_numpy(vector.copy()).to(device) for vector in (theta, momentum)]
    for _ in range(3):
        delta = rng.standard_normal(n).astype(np.float32) * np.float32(scale)
        step(ours[0], ours[1], torch.from_numpy(delta.copy()).to(device), learning_rate=learning_rate, beta=beta)
        reference.outer_step(theta, momentum, delta, learning_rate=learning_rate, beta=beta)
    assert ours[0].cpu().numpy().tobytes() == theta.tobytes()
    assert ours[1].cpu().numpy().tobytes() == momentum.tobytes()


def test_within_rounding_of_torch_sgd() -> None:
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(10_000, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    theta, momentum = start.clone(), torch.zeros_like(start)
    for _ in range(5):
        delta = torch.randn(10_000, generator=generator)
        parameter.grad = delta.clone()
        sgd.step()
        outer_step(theta, momentum, delta, learning_rate=0.7, beta=0.9)
    torch.testing.assert_close(theta, parameter.detach(), rtol=1e-6, atol=1e-6)
