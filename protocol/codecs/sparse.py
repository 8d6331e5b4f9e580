"""sparse: the 64 largest of every 4096 values, as an ordered set of indices and 2-bit values.

Encoded chunk of n elements, at most m = ceil(n / 64) values, b = ceil(n / 4096) blocks:

    b × uint16           scales, the upper half of an fp32 (bf16), little-endian
    ceil(m / 4) × uint8  2m bits: the upper parts of the indices
    ceil(3m / 4) × uint8 6m bits: the lower parts of the indices, 6 bits each
    ceil(m / 4) × uint8  2m bits: the values, 2 bits each

Bits are counted from the lowest bit of the first byte; unused bits are 0. The indices ascend. The lower 6 bits of each
are stored unchanged; if u_j is index j without them, bit u_j + j of the upper parts is 1, and all others are 0. So an
index costs 8 bits instead of 12, 0.6 above the minimum for any code of such a set, and the size is known in advance
(Elias–Fano: Elias, "Efficient storage and retrieval by content and address of static files", 1974).

A block's values share a scale s = mean / 8, where the mean is over its largest magnitudes; s is rounded down to bf16
and is at least 2^-126. A value is encoded as 10·s if its magnitude is at least 8.5·s, else as 7·s; the lower bit of its
code means 10, the upper bit that it is negative. Other values, and those nearer to 0 than to 7·s, are not sent: the
worker carries them over (error feedback, SparseLoCo: arXiv 2508.15706). The mean is taken, index by index, over the
workers that sent this index.
"""

import numpy as np
import numpy.typing as npt

from protocol.codecs import blocks
from protocol.codecs.base import F32, U8, Figures
from protocol.errors import WireError, WireFault

NAME = "sparse"
ERROR_FEEDBACK = True
FIGURES = Figures(zstd=0.982, up=None, down=None, pack=0.08, unpack=0.62, accumulate=1.4)
BLOCK = 4096
EVERY = 64  # one value in 64 is sent
SMALL, LARGE = 7, 10
LEAST, BETWEEN = np.float32(3.5), np.float32(8.5)

I64 = npt.NDArray[np.int64]


def most(n: int) -> int:
    """Return the largest number of values that are sent of n."""
    return -(-n // EVERY)


def _bounds(n: int) -> tuple[int, int, int]:
    """Return the byte offsets of the upper parts, the lower parts and the values."""
    uppers = 2 * blocks.count(n, BLOCK)
    lowers = uppers + -(-most(n) // 4)
    return uppers, lowers, lowers + -(-3 * most(n) // 4)


def size(n: int) -> int:
    return _bounds(n)[2] + -(-most(n) // 4)


def encode(x: F32, out: U8) -> None:
    indices = _largest(x)
    pack(x[indices], indices, len(x), out)


def _largest(x: F32) -> I64:
    """Return the ascending indices of each block's largest magnitudes, int64[most(n)]; among equals, the first."""
    # Bit patterns are ordered like the magnitudes; subtracting the index makes each key unique.
    keys = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.int64) * BLOCK - np.arange(len(x)) % BLOCK
    full = len(x) // BLOCK * BLOCK
    rows = np.argpartition(keys[:full].reshape(-1, BLOCK), -EVERY, axis=1)[:, -EVERY:]
    parts = [(rows + np.arange(0, full, BLOCK)[:, None]).reshape(-1)]
    if full < len(x):
        k = most(len(x) - full)
        parts.append(np.argpartition(keys[full:], -k)[-k:] + full)
    return np.sort(np.concatenate(parts))


def pack(x: F32, indices: I64, n: int, out: U8) -> None:
    """Encode the values x, float32[most(n)], at `indices` of n. Raises CodecError for values that are not finite."""
    uppers, lowers, values = _bounds(n)
    magnitudes = np.abs(x)
    means = blocks.means(NAME, magnitudes, EVERY)
    scales = blocks.pack_scales(NAME, means * np.float32(1 / 8), out[:uppers].view("<u2"))[indices // BLOCK]
    sent = np.flatnonzero(magnitudes >= scales * LEAST)
    x, indices, large = x[sent], indices[sent], (magnitudes >= scales * BETWEEN)[sent]
    places = np.zeros(2 * most(n), np.uint8)
    places[indices // EVERY + np.arange(len(indices))] = 1
    remainders = (indices % EVERY).astype(np.uint8)[:, None]
    _pack_bits(places, out[uppers:lowers])
    _pack_bits(np.unpackbits(remainders, axis=1, count=6, bitorder="little"), out[lowers:values])
    _pack_bits(np.stack([large.view(np.uint8), (x < 0).view(np.uint8)], axis=1), out[values:])


def _pack_bits(bits: U8, out: U8) -> None:
    packed = np.packbits(bits.reshape(-1), bitorder="little")
    out[: len(packed)] = packed
    out[len(packed) :] = 0


def _indices(data: U8, n: int) -> I64:
    """Return the indices, int64[k]; k is at most `most(n)` if the upper parts are valid."""
    uppers, lowers, values = _bounds(n)
    high = np.flatnonzero(np.unpackbits(data[uppers:lowers], bitorder="little"))
    bits = np.unpackbits(data[lowers:values], count=6 * len(high), bitorder="little").reshape(-1, 6)
    low = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    return (high - np.arange(len(high))) * EVERY + low


def _values(data: U8, n: int, indices: I64, scales: F32) -> F32:
    """Return the values, float32[k]: each level times the scale of its block."""
    bits = np.unpackbits(data[_bounds(n)[2] :], count=2 * len(indices), bitorder="little")
    levels = np.where(bits[::2], np.float32(LARGE), np.float32(SMALL))
    return np.where(bits[1::2], -levels, levels) * scales[indices // BLOCK]


def decode(data: U8, out: F32) -> None:
    n = len(out)
    indices = _indices(data, n)
    out[:] = 0
    out[indices] = _values(data, n, indices, blocks.unpack_scales(data[: _bounds(n)[0]]))


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    n = len(acc)
    indices = _indices(data, n)
    acc[indices] += _values(data, n, indices, blocks.unpack_scales(data[: _bounds(n)[0]]) * weight)


def add_weight(data: U8, weight: np.float32, total: F32) -> None:
    """Compute total += weight at each index that was sent."""
    total[_indices(data, len(total))] += weight


def check(data: U8, n: int, limit: float) -> None:
    uppers, lowers, values = _bounds(n)
    blocks.check_scales(NAME, data[:uppers])
    k = int(np.unpackbits(data[uppers:lowers]).sum())
    if k > most(n):
        raise WireError(WireFault.CODES, f"sparse: {k} indices; at most {most(n)} are sent for {n} values")
    for start, stop, used in ((uppers, lowers, 2 * most(n)), (lowers, values, 6 * k), (values, len(data), 2 * k)):
        if np.unpackbits(data[start:stop], bitorder="little")[used:].any():
            raise WireError(WireFault.CODES, f"sparse: bytes {start} to {stop} have bits beyond the last of {k} values")
    indices = _indices(data, n)
    if (indices >= n).any() or (np.diff(indices) <= 0).any():
        raise WireError(WireFault.CODES, f"sparse: the indices do not ascend, or are not below {n}")
    blocks.check_largest(NAME, data[:uppers], LARGE, limit)
