"""The outer step: Nesterov SGD on the averaged pseudo-gradient, bit-identical everywhere.

DiLoCo (arXiv 2311.08105, algorithm 1, line 14) with the arithmetic of torch.optim.SGD(nesterov=True).
One rounding per operation, in this order, never fused. `in_numpy` is the reference; the compiled kernels do the same in
one pass.
"""

import numpy as np
import numpy.typing as npt

from protocol.codecs.base import Codec
from protocol.compiled import COMPILED, kernels

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def outer_step(theta: F32, momentum: F32, delta: F32, *, learning_rate: float, beta: float) -> None:
    """Step `theta` and `momentum` in place by `delta`; all three float32[n]. `delta` may be overwritten.

        u ← β·u ;  u ← u + Δ ;  t ← β·u ;  t ← t + Δ ;  t ← η·t ;  θ ← θ − t

    `delta` is a pseudo-gradient, θ_global − θ_local, so the step *descends*.
    """
    if COMPILED:
        kernels.outer_step(theta, momentum, delta, learning_rate, beta)
    else:
        in_numpy(theta, momentum, delta, learning_rate=learning_rate, beta=beta)


def outer_step_by(codec: Codec, data: U8, theta: F32, momentum: F32, *, learning_rate: float, beta: float) -> None:
    """Step `theta` and `momentum` in place by an encoded delta, uint8[codec.size(n)]."""
    if codec.step is not None:
        codec.step(data, theta, momentum, learning_rate, beta)
        return
    delta = np.empty_like(theta)
    codec.decode(data, delta)
    outer_step(theta, momentum, delta, learning_rate=learning_rate, beta=beta)


def reached(theta: F32, momentum: F32, *, learning_rate: float, beta: float) -> F32:
    """Return the point that Nesterov's method has reached, float32[n]: x = θ + η·β·u.

        t ← β·u ;  t ← η·t ;  x ← θ + t

    θ is where it looks ahead from there, by one more step along u, and where gradients are taken (Sutskever et al.,
    ICML 2013; in this form Bengio et al., arXiv 1212.0901, section 3.5). So workers train on from θ, and x is the model
    that is evaluated and exported: it is a mean over more rounds, with less of the last one's noise.
    """
    point: F32 = momentum * np.float32(beta)
    np.multiply(point, np.float32(learning_rate), out=point)
    np.add(theta, point, out=point)
    return point


def in_numpy(theta: F32, momentum: F32, delta: F32, *, learning_rate: float, beta: float) -> None:
    """Compute `outer_step` operation by operation: the reference."""
    lr, mu = np.float32(learning_rate), np.float32(beta)
    np.multiply(momentum, mu, out=momentum)
    np.add(momentum, delta, out=momentum)
    step = momentum * mu
    np.add(step, delta, out=delta)
    np.multiply(delta, lr, out=delta)
    np.subtract(theta, delta, out=theta)
