"""The outer step: literal values, the written-out rule bit for bit, and torch.optim.SGD as the reference."""

import numpy as np
import pytest
import torch

from protocol.outer_step import outer_step, reached


def test_it_descends() -> None:
    """θ_global − θ_local moves the global parameters towards the local ones."""
    theta, local = np.array([1.0], np.float32), np.array([0.0], np.float32)
    outer_step(theta, np.zeros(1, np.float32), theta - local, learning_rate=0.1, beta=0.0)
    assert 0 < theta[0] < 1


@pytest.mark.parametrize(("learning_rate", "beta"), [(0.7, 0.9), (1.0, 0.8), (0.5, 0.5)])
def test_against_torch_sgd(learning_rate: float, beta: float) -> None:
    """torch.optim.SGD may fuse a multiply with an add: within a few units in the last place of the largest operand."""
    random = np.random.default_rng(1)
    start = random.standard_normal(1000).astype(np.float32)
    theta, momentum = start.copy(), np.zeros_like(start)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    reference = torch.optim.SGD([parameter], lr=learning_rate, momentum=beta, nesterov=True)
    largest = np.abs(start)
    for _ in range(10):
        delta = random.standard_normal(1000).astype(np.float32)
        parameter.grad = torch.from_numpy(delta.copy())
        reference.step()
        outer_step(theta, momentum, delta, learning_rate=learning_rate, beta=beta)
        largest = np.maximum(largest, np.abs(theta))
        assert (
            np.abs(theta - parameter.detach().numpy()) <= 16 * np.finfo(np.float32).eps * np.maximum(largest, 10)
        ).all()


def test_what_is_reached_is_the_iterate_of_nesterovs_method() -> None:
    """v ← μ·v − η·∇f(x + μ·v) ; x ← x + v (Sutskever et al. 2013, equations 3 and 4), on a quadratic."""
    lr, mu = 0.1, 0.9
    curvature = np.linspace(0.1, 2, 100)
    x, v = np.linspace(-1, 1, 100), np.zeros(100)
    theta, momentum = x.astype(np.float32), np.zeros(100, np.float32)
    for _ in range(20):
        assert np.allclose(reached(theta, momentum, learning_rate=lr, beta=mu), x, rtol=0, atol=1e-6)
        assert np.allclose(theta, x + mu * v, rtol=0, atol=1e-6)
        v = mu * v - lr * curvature * (x + mu * v)
        x = x + v
        outer_step(theta, momentum, curvature.astype(np.float32) * theta, learning_rate=lr, beta=mu)
