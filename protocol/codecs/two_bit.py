"""2bit: blocks of 256 values share one scale s; each value means one of -97·s, -29·s, 29·s, 97·s.

Encoded chunk of n elements, b = ceil(n / 256) blocks, h = ceil(n / 4):

    b × uint16   scales, the upper half of an fp32 (bf16), little-endian
    h × uint8    codes, 2 bits each: byte i has codes i, h + i, 2h + i, 3h + i, lowest bits first

A code's lower bit means 97 instead of 29, its upper bit that the value is negative. s = RMS / 64, rounded down to bf16
and at least 2^-126. 29/64 and 97/64 are the levels 0.4528 and 1.510 of the best quantiser of a Gaussian with four
levels (Lloyd–Max: Max, "Quantizing for minimum distortion", 1960), and 63/64 is halfway between them. The sender, a
worker or the coordinator, carries over the encoding error (error feedback).
"""

import numpy as np

from protocol.codecs import blocks
from protocol.codecs.base import F32, U8, Figures
from protocol.codecs.blocks import I8

NAME = "2bit"
ERROR_FEEDBACK = True
FOR_DELTAS = True  # with error feedback by the coordinator; ternary deltas cost 3 % of perplexity: docs/convergence.md
FIGURES = Figures(zstd=0.957, up=0.0058, down=0.0051, pack=0.30, unpack=0.69, accumulate=1.3)
BLOCK = 256
SMALL, LARGE = 29, 97
BETWEEN = np.float32(63)
PER_RMS = np.float32(1 / 64)


def _packed(n: int) -> int:
    return -(-n // 4)


def size(n: int) -> int:
    return 2 * blocks.count(n, BLOCK) + _packed(n)


def encode(x: F32, out: U8) -> None:
    start = 2 * blocks.count(len(x), BLOCK)
    scales = blocks.rms(NAME, x, BLOCK) * PER_RMS
    threshold = np.repeat(blocks.pack_scales(NAME, scales, out[:start].view("<u2")) * BETWEEN, BLOCK)[: len(x)]
    codes = (np.abs(x) >= threshold).astype(np.uint8)
    codes |= (x < 0).view(np.uint8) * np.uint8(2)
    blocks.pack_pairs(codes, out[start:])


def _levels(data: U8, n: int) -> I8:
    """Unpack the codes uint8[h] -> int8[n], each ±29 or ±97."""
    codes = blocks.unpack_pairs(data, n)
    magnitudes = (codes.view(np.uint8) & np.uint8(0x40)) // np.uint8(0x40) * np.uint8(LARGE - SMALL) + np.uint8(SMALL)
    signs = codes >> np.int8(7)  # -1 or 0
    return (magnitudes.view(np.int8) ^ signs) - signs


def decode(data: U8, out: F32) -> None:
    blocks.decode(data, BLOCK, _levels, out)


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    blocks.accumulate(data, weight, BLOCK, _levels, acc)


def check(data: U8, n: int, limit: float) -> None:
    start = 2 * blocks.count(n, BLOCK)
    blocks.check_scales(NAME, data[:start])
    blocks.check_padding(NAME, data[start:], n)
    blocks.check_largest(NAME, data[:start], LARGE, limit)
