"""What the block codecs share: blocks of values with one scale each, and codes q that mean q · s.

A scale is the upper half of an fp32 number (bf16), little-endian uint16, between 2^-126 and 2^120. It has 8 significant
bits and no code has more than 7, so q · s is exact in fp32 and decoding does not round at all. The lower bound keeps
1/s finite and every decoded value out of the denormals, which some GPUs flush to zero.
"""

import numpy as np
import numpy.typing as npt

from protocol.errors import CodecError, WireError

MIN_SCALE_BITS = 0x0080  # 2^-126 as bf16
MAX_SCALE_BITS = 0x7B80  # 2^120 as bf16: 127 of them are still finite

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
U16 = npt.NDArray[np.uint16]


def count(n: int, block: int) -> int:
    """Blocks of n values; the last one may be shorter."""
    return -(-n // block)


def unpack_scales(data: U8) -> F32:
    """uint8[2b] -> float32[b]."""
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def check_scales(name: str, data: U8, most: int, limit: float) -> None:
    """WireError unless the scales uint8[2b] are allowed, and `most` times the largest is at most `limit`."""
    scales = data.view("<u2")
    if ((scales < MIN_SCALE_BITS) | (scales > MAX_SCALE_BITS)).any():
        raise WireError(f"{name}: a block's scale is not between 2^-126 and 2^120")
    largest = most * float((np.uint32(scales.max()) << np.uint32(16)).view(np.float32))
    if largest > limit:
        raise WireError(f"{name}: a block's values reach {largest:g}, at most {limit:g} is allowed")


def scaled(codes: I8, scales: F32, block: int, out: F32) -> None:
    """out = codes · scales, int8[n] by float32[b] -> float32[n]."""
    full = len(out) // block * block
    np.copyto(out, codes)
    rows = out[:full].reshape(-1, block)
    np.multiply(rows, scales[: full // block, None], out=rows)
    if full < len(out):
        out[full:] *= scales[-1]


def encode_absmax(name: str, x: F32, most: int, block: int, scales: U16, codes: I8) -> None:
    """float32[n] -> uint16[b], int8[n]: each block's largest magnitude becomes the code `most`, or one less."""
    full = len(x) // block * block
    if full:
        rows = codes[:full].reshape(-1, block)
        _encode_rows(name, x[:full].reshape(-1, block), most, scales[: full // block], rows)
    if full < len(x):
        _encode_rows(name, x[full:].reshape(1, -1), most, scales[full // block :], codes[full:].reshape(1, -1))


def _encode_rows(name: str, x: F32, most: int, scales: U16, codes: I8) -> None:
    """float32[b, k] -> uint16[b], int8[b, k]."""
    values = np.abs(x)
    absmax = values.max(axis=1)
    bits = (absmax / np.float32(most)).view(np.uint32)
    bits += np.uint32(0xFFFF)  # up
    bits >>= np.uint32(16)
    np.maximum(bits, np.uint32(MIN_SCALE_BITS), out=bits)
    if not (absmax <= np.inf).all() or (bits > MAX_SCALE_BITS).any():
        raise CodecError(f"{name}: the values contain NaN, infinity or more than {most} · 2^120")
    scales[:] = bits
    bits <<= np.uint32(16)
    np.multiply(x, (np.float32(1) / bits.view(np.float32))[:, None], out=values)
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")
