"""ternary: blocks of 64 values share one level s; each value is a code q in {-1, 0, 1} and means q·s.

Encoded chunk of n elements, b = ceil(n / 64) blocks, h = ceil(n / 4):

    b × uint16   levels, the upper half of an fp32 (bf16), little-endian
    h × uint8    codes in two's complement, 2 bits each: byte i has codes i, h + i, 2h + i, 3h + i, lowest bits first

s = 1.5 · RMS, rounded down to bf16 and at least 2^-126; q is the sign of x where 1.5 · |x| ≥ s, else 0: so a value is
sent if its magnitude is at least the block's RMS. Two thirds of a Gaussian's values are then 0, which zstd compresses.
The worker carries over the encoding error (error feedback).
"""

import numpy as np

from protocol.codecs import blocks
from protocol.codecs.base import F32, U8, Figures
from protocol.codecs.blocks import I8
from protocol.errors import WireError, WireFault

NAME = "ternary"
ERROR_FEEDBACK = True
FIGURES = Figures(zstd=0.683, up=0.0087, down=None, pack=0.29, unpack=0.74, accumulate=1.7)
BLOCK = 64
LEVEL = np.float32(1.5)  # times a block's RMS; the mean of a Gaussian's values beyond the RMS is 1.525 times the RMS


def _packed(n: int) -> int:
    return -(-n // 4)


def size(n: int) -> int:
    return 2 * blocks.count(n, BLOCK) + _packed(n)


def encode(x: F32, out: U8) -> None:
    start = 2 * blocks.count(len(x), BLOCK)
    levels = blocks.rms(NAME, x, BLOCK) * LEVEL
    threshold = np.repeat(blocks.pack_scales(NAME, levels, out[:start].view("<u2")), BLOCK)[: len(x)]
    values = x * LEVEL
    codes = (values >= threshold).astype(np.uint8)
    codes |= (values <= -threshold).view(np.uint8) * np.uint8(3)
    blocks.pack_pairs(codes, out[start:])


def _codes(data: U8, n: int) -> I8:
    codes = blocks.unpack_pairs(data, n)
    codes >>= np.int8(6)
    return codes


def decode(data: U8, out: F32) -> None:
    blocks.decode(data, BLOCK, _codes, out)


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    blocks.accumulate(data, weight, BLOCK, _codes, acc)


def check(data: U8, n: int, limit: float) -> None:
    start = 2 * blocks.count(n, BLOCK)
    blocks.check_scales(NAME, data[:start])
    packed = data[start:]
    if (packed & ~(packed << np.uint8(1)) & np.uint8(0xAA)).any():
        raise WireError(WireFault.CODES, "ternary: a code is -2; codes are -1 to 1")
    blocks.check_padding(NAME, packed, n)
    blocks.check_largest(NAME, data[:start], 1, limit)
