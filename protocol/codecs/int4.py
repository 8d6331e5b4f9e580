"""int4: blocks of 256 values share one scale s; each value is a code q in [-7, 7] and means q·s.

Encoded chunk of n elements, b = ceil(n / 256) blocks, h = ceil(n / 2):

    b × uint16   scales, the upper half of an fp32 (bf16), little-endian
    h × uint8    codes in two's complement: byte i has code i in its lower half, code h + i in its upper half

A byte holds one code of each half of the chunk, not two adjacent ones. So nothing has to be interleaved, and packing
runs at memory speed. s = absmax / 7, rounded *up* to bf16 and at least 2^-126, so that |q| ≤ 7; q = rint(x · (1/s)),
ties to even.
"""

import numpy as np

from protocol.codecs import blocks
from protocol.codecs.base import F32, U8, Figures
from protocol.codecs.blocks import I8
from protocol.errors import WireError, WireFault

NAME = "int4"
ERROR_FEEDBACK = False
FIGURES = Figures(zstd=0.827, up=0.0005, down=0.0010, pack=1.50, unpack=1.15, accumulate=6.4)
BLOCK = 256
MOST = 7


def _packed(n: int) -> int:
    return (n + 1) // 2


def size(n: int) -> int:
    return 2 * blocks.count(n, BLOCK) + _packed(n)


def encode(x: F32, out: U8) -> None:
    n, start = len(x), 2 * blocks.count(len(x), BLOCK)
    codes = np.zeros(2 * _packed(n), np.int8)
    blocks.encode_absmax(NAME, x, MOST, BLOCK, out[:start].view("<u2"), codes[:n])
    lower, upper = codes.view(np.uint8).reshape(2, -1)
    np.bitwise_or(lower & np.uint8(0x0F), upper * np.uint8(16), out=out[start:])


def _codes(data: U8, n: int) -> I8:
    codes = np.empty((2, _packed(n)), np.uint8)
    np.multiply(data, np.uint8(16), out=codes[0])
    codes[1] = data
    signed = codes.view(np.int8).reshape(-1)[:n]
    signed >>= np.int8(4)
    return signed


def decode(data: U8, out: F32) -> None:
    blocks.decode(data, BLOCK, _codes, out)


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    blocks.accumulate(data, weight, BLOCK, _codes, acc)


def check(data: U8, n: int, limit: float) -> None:
    start = 2 * blocks.count(n, BLOCK)
    blocks.check_scales(NAME, data[:start])
    packed = data[start:]
    if ((packed & np.uint8(0x0F)) == 0x08).any() or ((packed & np.uint8(0xF0)) == 0x80).any():
        raise WireError(WireFault.CODES, "int4: a code is -8; codes are -7 to 7")
    if n % 2 and packed[-1] > 0x0F:
        raise WireError(WireFault.CODES, "int4: there is a code after the last value")
    blocks.check_largest(NAME, data[:start], MOST, limit)
