"""int8: blocks of 256 values share one scale s; each value is a code q in [-127, 127] and means q·s.

Encoded chunk of n elements, b = ceil(n / 256) blocks:

    b × uint16   scales, the upper half of an fp32 (bf16), little-endian
    n × int8     codes

s = absmax / 127, rounded *up* to bf16 and at least 2^-126, so that |q| ≤ 127; q = rint(x · (1/s)), ties to even.
"""

import numpy as np

from protocol.codecs import blocks
from protocol.codecs.base import F32, U8, Figures
from protocol.codecs.blocks import I8
from protocol.errors import WireError, WireFault

NAME = "int8"
ERROR_FEEDBACK = False
FIGURES = Figures(zstd=0.931, up=0.0003, down=0.0001, pack=0.85, unpack=0.84, accumulate=5.8)
BLOCK = 256
MOST = 127


def size(n: int) -> int:
    return 2 * blocks.count(n, BLOCK) + n


def encode(x: F32, out: U8) -> None:
    start = 2 * blocks.count(len(x), BLOCK)
    blocks.encode_absmax(NAME, x, MOST, BLOCK, out[:start].view("<u2"), out[start:].view(np.int8))


def _codes(data: U8, n: int) -> I8:
    return data.view(np.int8)


def decode(data: U8, out: F32) -> None:
    blocks.decode(data, BLOCK, _codes, out)


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    blocks.accumulate(data, weight, BLOCK, _codes, acc)


def check(data: U8, n: int, limit: float) -> None:
    start = 2 * blocks.count(n, BLOCK)
    blocks.check_scales(NAME, data[:start])
    if data[start:].view(np.int8).min() == -128:
        raise WireError(WireFault.CODES, "int8: a code is -128; codes are -127 to 127")
    blocks.check_largest(NAME, data[:start], MOST, limit)
