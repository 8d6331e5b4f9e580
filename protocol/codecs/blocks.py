"""Shared by all block codecs: blocks of values with one scale s each, and codes q that mean q · s.

A scale is the upper half of an fp32 number (bf16), little-endian uint16, between 2^-126 and 2^120. It has 8 significant
bits and a code at most 7, so q · s is exact in fp32 and decoding never rounds. The lower bound keeps 1/s finite and
decoded values out of the denormals, which some GPUs flush to zero.
"""

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from protocol.codecs.base import F32, U8
from protocol.errors import CodecError, WireError, WireFault

MIN_SCALE_BITS = 0x0080  # 2^-126 as bf16
MAX_SCALE_BITS = 0x7B80  # 2^120 as bf16: 127 times that is still finite

I8 = npt.NDArray[np.int8]
U16 = npt.NDArray[np.uint16]


class _Scratch(threading.local):
    """A temporary array per thread, reused because it is still in the CPU cache from the previous chunk."""

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)

    def of(self, n: int) -> F32:
        if len(self._values) < n:
            self._values = np.empty(n, np.float32)
        return self._values[:n]


_scratch = _Scratch()


def count(n: int, block: int) -> int:
    """Return the number of blocks of n values; the last one may be shorter."""
    return -(-n // block)


def unpack_scales(data: U8) -> F32:
    """Return the scales uint8[2b] as float32[b]."""
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def check_scales(name: str, data: U8) -> None:
    """Raise WireError unless the scales uint8[2b] are allowed."""
    scales = data.view("<u2")
    if ((scales < MIN_SCALE_BITS) | (scales > MAX_SCALE_BITS)).any():
        raise WireError(WireFault.CODES, f"{name}: a block's scale is not between 2^-126 and 2^120")


def check_largest(name: str, data: U8, most: int, limit: float) -> None:
    """Raise WireError unless `most` times the largest of the scales uint8[2b] is at most `limit`."""
    largest = most * float((np.uint32(data.view("<u2").max()) << np.uint32(16)).view(np.float32))
    if largest > limit:
        raise WireError(
            WireFault.MAGNITUDE, f"{name}: a block's values reach {largest:g}, at most {limit:g} is allowed"
        )


def scaled(codes: I8, scales: F32, block: int, out: F32) -> None:
    """Compute out = codes · scales, int8[n] by float32[b] -> float32[n]."""
    full = len(out) // block * block
    np.copyto(out, codes)
    rows = out[:full].reshape(-1, block)
    np.multiply(rows, scales[: full // block, None], out=rows)
    if full < len(out):
        out[full:] *= scales[-1]


def decode(data: U8, block: int, codes: Callable[[U8, int], I8], out: F32) -> None:
    """Decode a chunk of scales and then codes, uint8[size(n)] -> float32[n]. `codes` unpacks n codes."""
    start = 2 * count(len(out), block)
    scaled(codes(data[start:], len(out)), unpack_scales(data[:start]), block, out)


def accumulate(data: U8, weight: np.float32, block: int, codes: Callable[[U8, int], I8], acc: F32) -> None:
    """Compute acc += codes · (scales · weight), the product in brackets first."""
    start = 2 * count(len(acc), block)
    values = _scratch.of(len(acc))
    scaled(codes(data[start:], len(acc)), unpack_scales(data[:start]) * weight, block, values)
    np.add(acc, values, out=acc)


def encode_absmax(name: str, x: F32, most: int, block: int, scales: U16, codes: I8) -> None:
    """Encode float32[n] -> uint16[b], int8[n]. Each block's largest magnitude gets the code `most` or one less."""
    full = len(x) // block * block
    if full:
        rows = codes[:full].reshape(-1, block)
        _encode_rows(name, x[:full].reshape(-1, block), most, scales[: full // block], rows)
    if full < len(x):
        _encode_rows(name, x[full:].reshape(1, -1), most, scales[full // block :], codes[full:].reshape(1, -1))


def _encode_rows(name: str, x: F32, most: int, scales: U16, codes: I8) -> None:
    """Encode b blocks of k values: float32[b, k] -> uint16[b], int8[b, k]."""
    values = np.abs(x)
    # Per row; twice as fast as `values.max(axis=1)`.
    absmax = np.maximum.reduceat(values.reshape(-1), np.arange(0, values.size, values.shape[1]))
    bits = (absmax / np.float32(most)).view(np.uint32)
    bits += np.uint32(0xFFFF)  # up
    bits >>= np.uint32(16)
    np.maximum(bits, np.uint32(MIN_SCALE_BITS), out=bits)
    if not (absmax <= np.inf).all() or (bits > MAX_SCALE_BITS).any():
        raise CodecError(f"{name}: the values contain NaN, infinity or a magnitude above {most} · 2^120")
    scales[:] = bits
    bits <<= np.uint32(16)
    np.multiply(x, (np.float32(1) / bits.view(np.float32))[:, None], out=values)
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")


def means(name: str, x: F32, block: int) -> F32:
    """Return the mean of each block of non-negative values, float32[n] -> float32[b].

    The last block is padded with zeros. The second half of each block is added to the first, repeatedly, until one sum
    is left, which is divided by the number of values. Raises CodecError if a sum is not finite.
    """
    blocks = count(len(x), block)
    sums = np.zeros((blocks, block), np.float32)
    sums.reshape(-1)[: len(x)] = x
    with np.errstate(over="ignore", invalid="ignore"):
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
    result: F32 = sums[:, 0]
    if not np.isfinite(result).all():
        raise CodecError(f"{name}: the values contain NaN or infinity, or their sum is too large for fp32")
    result[:-1] /= np.float32(block)
    result[-1] /= np.float32(len(x) - (blocks - 1) * block)
    return result


def rms(name: str, x: F32, block: int) -> F32:
    """Return the root mean square of each block, float32[n] -> float32[b]."""
    with np.errstate(over="ignore", invalid="ignore"):
        roots: F32 = np.sqrt(means(name, x * x, block))
    return roots


def pack_scales(name: str, values: F32, scales: U16) -> F32:
    """Return the scales float32[b], rounded toward zero and at least 2^-126, and write them to `scales`, uint16[b]."""
    bits = np.maximum(values.view(np.uint32) >> np.uint32(16), np.uint32(MIN_SCALE_BITS))
    if (bits > MAX_SCALE_BITS).any():
        raise CodecError(f"{name}: the values are too large: a block's scale may be at most 2^120")
    scales[:] = bits
    rounded: F32 = (bits << np.uint32(16)).view(np.float32)
    return rounded


def pack_pairs(codes: U8, out: U8) -> None:
    """Pack 2-bit codes uint8[n] -> uint8[h], h = ceil(n / 4).

    Byte i has the codes i, h + i, 2h + i and 3h + i, from its lowest bits up. Codes after the n-th are 0.
    """
    h = len(out)
    out[:] = codes[:h]
    for k in (1, 2, 3):
        part = codes[k * h : (k + 1) * h]
        out[: len(part)] |= part * np.uint8(4**k)


def unpack_pairs(data: U8, n: int) -> I8:
    """Reverse `pack_pairs`: int8[n], each code in the two upper bits, the lower bits 0."""
    h = len(data)
    codes = np.empty((4, h), np.uint8)
    for k in range(4):
        np.multiply(data, np.uint8(4 ** (3 - k)), out=codes[k])
    codes &= np.uint8(0xC0)
    return codes.reshape(-1)[:n].view(np.int8)


def check_padding(name: str, data: U8, n: int) -> None:
    """Raise WireError unless the 2-bit codes after the n-th are 0."""
    if unpack_pairs(data, 4 * len(data))[n:].any():
        raise WireError(WireFault.CODES, f"{name}: there are codes after the last value")
