"""int8: blocks of 256 values share one scale s; each value is a code q in [-127, 127] and means q·s.

Encoded chunk of n elements, b = ceil(n / 256) blocks:

    b × uint16   scales, the upper half of an fp32 (bf16), little-endian
    n × int8     codes

s = absmax / 127, rounded *up* to bf16 and at least 2^-126; q = rint(x · (1/s)), ties to even. A bf16 scale has 8
significant bits, so q·s is exact in fp32 and decoding does not round at all; rounding s up keeps |q| ≤ 127;
the lower bound keeps 1/s finite and every decoded value out of the denormals, which some GPUs flush to zero.
"""

import numpy as np
import numpy.typing as npt

from protocol.errors import CodecError, WireError

NAME = "int8"
BLOCK = 256
MIN_SCALE_BITS = 0x0080  # 2^-126 as bf16
MAX_SCALE_BITS = 0x7B80  # 2^120 as bf16: 127 of them are still finite

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def size(n: int) -> int:
    return 2 * _blocks(n) + n


def encode(x: F32, out: U8) -> None:
    full = len(x) // BLOCK * BLOCK
    scales, codes = out[: 2 * _blocks(len(x))].view("<u2"), out[2 * _blocks(len(x)) :].view(np.int8)
    _encode_blocks(x[:full].reshape(-1, BLOCK), scales[: full // BLOCK], codes[:full].reshape(-1, BLOCK))
    if full < len(x):
        _encode_blocks(x[full:].reshape(1, -1), scales[full // BLOCK :], codes[full:].reshape(1, -1))


def _encode_blocks(x: F32, scales: npt.NDArray[np.uint16], codes: npt.NDArray[np.int8]) -> None:
    """float32[b, k] -> uint16[b], int8[b, k]."""
    if not len(x):
        return
    values = np.abs(x)
    absmax = values.max(axis=1)
    bits = (absmax / np.float32(127)).view(np.uint32)
    bits += np.uint32(0xFFFF)  # up
    bits >>= np.uint32(16)
    np.maximum(bits, np.uint32(MIN_SCALE_BITS), out=bits)
    if not (absmax <= np.inf).all() or (bits > MAX_SCALE_BITS).any():
        raise CodecError("int8: the values contain NaN, infinity or more than 127 · 2^120")
    scales[:] = bits
    bits <<= np.uint32(16)
    np.multiply(x, (np.float32(1) / bits.view(np.float32))[:, None], out=values)
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")


def _scaled(data: U8, weight: np.float32 | None, out: F32) -> None:
    """out = codes · scales, or codes · (weight · scales)."""
    n = len(out)
    blocks, full = _blocks(n), n // BLOCK * BLOCK
    scales = (data[: 2 * blocks].view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if weight is not None:
        scales *= weight
    np.copyto(out, data[2 * blocks :].view(np.int8))
    rows = out[:full].reshape(-1, BLOCK)
    np.multiply(rows, scales[: full // BLOCK, None], out=rows)
    if full < n:
        out[full:] *= scales[-1]


def decode(data: U8, out: F32) -> None:
    _scaled(data, None, out)


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    values = np.empty_like(acc)
    _scaled(data, weight, values)
    np.add(acc, values, out=acc)


def check(data: U8, n: int, limit: float) -> None:
    scales = data[: 2 * _blocks(n)].view("<u2")
    if ((scales < MIN_SCALE_BITS) | (scales > MAX_SCALE_BITS)).any():
        raise WireError("int8: a block's scale is not between 2^-126 and 2^120")
    largest = 127 * float((np.uint32(scales.max()) << np.uint32(16)).view(np.float32))
    if largest > limit:
        raise WireError(f"int8: a block's values reach {largest:g}, at most {limit:g} is allowed")
    if (data[2 * _blocks(n) :].view(np.int8) == -128).any():
        raise WireError("int8: a code is -128; codes are -127 to 127")
