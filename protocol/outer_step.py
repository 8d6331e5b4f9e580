"""The outer step in numpy: Nesterov SGD on the averaged pseudo-gradient, bit-identical everywhere.

DiLoCo (arXiv 2311.08105, algorithm 1, line 14) with the arithmetic of torch.optim.SGD(nesterov=True).
One rounding per operation, in this order, never fused; `worker/outer_step.py` does the same in torch.
"""

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def outer_step(theta: F32, momentum: F32, delta: F32, *, learning_rate: float, beta: float) -> None:
    """Step `theta` and `momentum` in place by `delta`; all three float32[n]. `delta` is overwritten.

        u ← β·u ;  u ← u + Δ ;  t ← β·u ;  t ← t + Δ ;  t ← η·t ;  θ ← θ − t

    `delta` is a pseudo-gradient, θ_global − θ_local, so the step *descends*.
    """
    lr, mu = np.float32(learning_rate), np.float32(beta)
    np.multiply(momentum, mu, out=momentum)
    np.add(momentum, delta, out=momentum)
    step = momentum * mu
    np.add(step, delta, out=delta)
    np.multiply(delta, lr, out=delta)
    np.subtract(theta, delta, out=theta)
