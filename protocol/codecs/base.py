"""What a codec is, and its measurements for `outerstep plan`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Figures:
    """Measurements of one codec. docs/performance.md describes how each was made.

    zstd                       bytes after zstd level 1 as a share of the bytes before, for real pseudo-gradients
    up, down                   loss above fp32's in nats per byte, as upload and as download codec; None: not measured
    pack, unpack, accumulate   10^9 elements per second on one core
    """

    zstd: float
    up: float | None
    down: float | None
    pack: float
    unpack: float
    accumulate: float


UNKNOWN = Figures(zstd=1.0, up=None, down=None, pack=0.1, unpack=0.1, accumulate=0.5)


@dataclass(frozen=True)
class Codec:
    """A way of encoding fp32 values.

    name                           its name on the wire and in run specs
    size(n)                        exact number of bytes of n encoded elements
    encode(x, out)                 float32[n] -> uint8[size(n)]; CodecError for values that it cannot represent
    decode(data, out)              uint8[size(n)] -> float32[n]
    accumulate(data, weight, acc)  acc += weight · decode(data), rounded as docs/wire-format.md specifies
    check(data, n, limit)          WireError unless all n decoded values are finite and at most `limit` in magnitude
    error_feedback                 True if the sender carries over the encoding error, as it must below 4 bits
    for_deltas                     True if it may be the codec of deltas
    figures                        measurements for the planner; UNKNOWN if there are none
    add_weight(data, weight, sum)  sum += weight at each index that was sent; None if every index is always sent
    step(data, θ, u, η, μ)         the outer step by the decoded values, in one pass; None without a kernel for it
    sketch(data, n, …)             `kernels.sketch` of the decoded values, in one pass; None without a kernel for it
    """

    name: str
    size: Callable[[int], int]
    encode: Callable[[F32, U8], None]
    decode: Callable[[U8, F32], None]
    accumulate: Callable[[U8, np.float32, F32], None]
    check: Callable[[U8, int, float], None]
    error_feedback: bool
    for_deltas: bool
    figures: Figures
    add_weight: Callable[[U8, np.float32, F32], None] | None
    step: Callable[[U8, F32, F32, float, float], None] | None = None
    sketch: Callable[[U8, int, int, U8, F32, F64], None] | None = None
