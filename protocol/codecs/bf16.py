"""bf16: the upper half of each fp32 value, rounded to nearest even, little-endian uint16."""

import numpy as np

from protocol.codecs.base import F32, U8, Figures
from protocol.errors import CodecError, WireError, WireFault

NAME = "bf16"
ERROR_FEEDBACK = False
FIGURES = Figures(zstd=0.793, up=0.0007, down=0.0007, pack=0.20, unpack=0.47, accumulate=2.9)

_EXPONENT = np.uint16(0x7F80)  # all ones: infinity or NaN
_MAGNITUDE = np.uint16(0x7FFF)


def size(n: int) -> int:
    return 2 * n


def encode(x: F32, out: U8) -> None:
    bits = x.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)  # to even
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    half = rounded.astype("<u2")
    # A NaN's sum may wrap around to a finite pattern, so the input is checked as well as the result.
    if not np.isfinite(x).all() or ((half & _EXPONENT) == _EXPONENT).any():
        raise CodecError("bf16: the values contain NaN, infinity or values too large for bf16")
    out.view("<u2")[:] = half


def decode(data: U8, out: F32) -> None:
    bits = out.view(np.uint32)
    bits[:] = data.view("<u2")
    bits <<= np.uint32(16)


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    values = np.empty_like(acc)
    decode(data, values)
    np.multiply(values, weight, out=values)
    np.add(acc, values, out=acc)


def check(data: U8, n: int, limit: float) -> None:
    bits = np.uint32((data.view("<u2") & _MAGNITUDE).max())  # bit patterns are ordered like the magnitudes
    largest = (bits << np.uint32(16)).view(np.float32)
    if not largest <= limit:
        fault = WireFault.MAGNITUDE if np.isfinite(largest) else WireFault.CODES
        raise WireError(fault, f"{NAME}: a value has the magnitude {largest:g}, at most {limit:g} is allowed")
