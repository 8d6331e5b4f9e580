"""The outer step in torch: the same bits as `protocol/outer_step.py`, on any device.

DiLoCo (arXiv 2311.08105, algorithm 1, line 14) with the arithmetic of torch.optim.SGD(nesterov=True), one rounding per
operation. `alpha=`, addcmul and torch.compile would fuse two of them, so none is used.
"""

import torch
from torch import Tensor

# In pieces that stay in the cache: six passes over memory become about one.
_PIECE = 1 << 18


def outer_step(theta: Tensor, momentum: Tensor, delta: Tensor, *, learning_rate: float, beta: float) -> None:
    """Step `theta` and `momentum` in place by `delta`; all three float32[n] on one device.

    u ← β·u ;  u ← u + Δ ;  t ← β·u ;  t ← t + Δ ;  t ← η·t ;  θ ← θ − t
    """
    lr = torch.tensor(learning_rate, dtype=torch.float32, device=theta.device)
    mu = torch.tensor(beta, dtype=torch.float32, device=theta.device)
    for theta_piece, u, d in zip(theta.split(_PIECE), momentum.split(_PIECE), delta.split(_PIECE), strict=True):
        u.mul_(mu)
        u.add_(d)
        step = u * mu
        step.add_(d)
        step.mul_(lr)
        theta_piece.sub_(step)
