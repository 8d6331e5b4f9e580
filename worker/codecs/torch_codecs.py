"""Every codec in torch: the same bytes and values, bit for bit, as `protocol.codecs`, on the device of the argument.

Each codec's format is described in its module in protocol/codecs/. Every operation is one fp32 operation rounded to
nearest even, as the format requires. Several chunks are encoded at once, because a GPU takes longer to start the
operations than to run them on one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol.codecs import bf16, fp32, int4, int8, sparse, ternary, two_bit
from protocol.codecs.blocks import count
from protocol.errors import CodecError
from worker.codecs import blocks


@dataclass(frozen=True)
class TorchCodec:
    """A codec in torch, on the device of its argument.

    encode(float32[..., n]) -> uint8[..., size(n)]; CodecError for values that it cannot represent
    decode(uint8[size(n)], n) -> float32[n]
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]


def encode_fp32(x: Tensor) -> Tensor:
    if not bool(torch.isfinite(x).all()):
        raise CodecError("fp32: the values contain NaN or infinity")
    return x.contiguous().view(torch.uint8)


def decode_fp32(data: Tensor, n: int) -> Tensor:
    return data.view(torch.float32)


def encode_bf16(x: Tensor) -> Tensor:
    half = x.to(torch.bfloat16)
    # Rounding can turn a finite value into infinity, never the reverse. So checking the result is enough.
    if not bool(torch.isfinite(half).all()):
        raise CodecError("bf16: the values contain NaN, infinity or values too large for bf16")
    return half.view(torch.uint8)


def decode_bf16(data: Tensor, n: int) -> Tensor:
    return data.view(torch.bfloat16).to(torch.float32)


def encode_int8(x: Tensor) -> Tensor:
    n = x.shape[-1]
    out, scales = _empty(x, int8.size(n)), _scales(x, int8.BLOCK)
    start = 2 * scales.shape[-1]
    blocks.encode_absmax(int8.NAME, x, int8.MOST, int8.BLOCK, scales, out[..., start:].view(torch.int8))
    out[..., :start] = scales.view(torch.uint8)
    return out


def decode_int8(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, int8.BLOCK)
    return blocks.scaled(data[start:].view(torch.int8), blocks.unpack_scales(data[:start]), int8.BLOCK)


def encode_int4(x: Tensor) -> Tensor:
    n = x.shape[-1]
    out, scales = _empty(x, int4.size(n)), _scales(x, int4.BLOCK)
    start = 2 * scales.shape[-1]
    codes = _empty(x, 2 * (out.shape[-1] - start)).view(torch.int8)
    codes[..., n:] = 0
    blocks.encode_absmax(int4.NAME, x, int4.MOST, int4.BLOCK, scales, codes[..., :n])
    out[..., :start] = scales.view(torch.uint8)
    lower, upper = codes.view(torch.uint8).chunk(2, dim=-1)
    torch.bitwise_or(lower.bitwise_and_(0x0F), upper.mul_(16), out=out[..., start:])
    return out


def decode_int4(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, int4.BLOCK)
    packed = data[start:]
    codes = torch.cat([packed * 16, packed]).view(torch.int8).bitwise_right_shift_(4)
    return blocks.scaled(codes[:n], blocks.unpack_scales(data[:start]), int4.BLOCK)


def encode_two_bit(x: Tensor) -> Tensor:
    n = x.shape[-1]
    out, scales = _empty(x, two_bit.size(n)), _scales(x, two_bit.BLOCK)
    start = 2 * scales.shape[-1]
    rms = blocks.rms(two_bit.NAME, x, two_bit.BLOCK) * float(two_bit.PER_RMS)
    levels = blocks.pack_scales(two_bit.NAME, rms, scales)
    out[..., :start] = scales.view(torch.uint8)
    codes = (x.abs() >= blocks.of_each(levels * float(two_bit.BETWEEN), two_bit.BLOCK, n)).to(torch.uint8)
    codes.bitwise_or_((x < 0).to(torch.uint8).mul_(2))
    blocks.pack_pairs(codes, out[..., start:])
    return out


def decode_two_bit(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, two_bit.BLOCK)
    codes = blocks.unpack_pairs(data[start:], n)
    levels = codes.bitwise_and(0x40).bitwise_right_shift_(6).mul_(two_bit.LARGE - two_bit.SMALL).add_(two_bit.SMALL)
    signs = codes.bitwise_right_shift_(7)  # -1 or 0
    values = levels.bitwise_xor_(signs).sub_(signs)
    return blocks.scaled(values, blocks.unpack_scales(data[:start]), two_bit.BLOCK)


def encode_ternary(x: Tensor) -> Tensor:
    n, level = x.shape[-1], float(ternary.LEVEL)
    out, scales = _empty(x, ternary.size(n)), _scales(x, ternary.BLOCK)
    start = 2 * scales.shape[-1]
    rms = blocks.rms(ternary.NAME, x, ternary.BLOCK) * level
    levels = blocks.pack_scales(ternary.NAME, rms, scales)
    out[..., :start] = scales.view(torch.uint8)
    threshold, values = blocks.of_each(levels, ternary.BLOCK, n), x * level
    codes = (values >= threshold).to(torch.uint8)
    codes.bitwise_or_((values <= threshold.neg_()).to(torch.uint8).mul_(3))
    blocks.pack_pairs(codes, out[..., start:])
    return out


def decode_ternary(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, ternary.BLOCK)
    codes = blocks.unpack_pairs(data[start:], n).bitwise_right_shift_(6)
    return blocks.scaled(codes, blocks.unpack_scales(data[:start]), ternary.BLOCK)


def encode_sparse(x: Tensor) -> Tensor:
    """The device finds the largest values; the numpy reference packs these few."""
    if x.dim() > 1:
        return torch.stack([encode_sparse(row) for row in x])
    indices = _largest(x)
    out = np.empty(sparse.size(len(x)), np.uint8)
    sparse.pack(x[indices].cpu().numpy(), indices.cpu().numpy(), len(x), out)
    return torch.from_numpy(out).to(x.device)


def _largest(x: Tensor) -> Tensor:
    """Return the indices of each block's largest magnitudes, ascending, the first of equal ones: int64[most(n)]."""
    block = sparse.BLOCK
    places = torch.arange(len(x), device=x.device)
    keys = x.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64).mul_(block).sub_(places % block)
    full = len(x) // block * block
    rows = keys[:full].view(-1, block).topk(sparse.EVERY, dim=1, sorted=False).indices
    rest = keys[full:].topk(sparse.most(len(x) - full)).indices + full
    return torch.cat([(rows + places[:full:block, None]).view(-1), rest]).sort().values


def _empty(x: Tensor, size: int) -> Tensor:
    """Return memory for `size` bytes of each row of float32[..., n]: uint8[..., size]."""
    return torch.empty((*x.shape[:-1], size), dtype=torch.uint8, device=x.device)


def _scales(x: Tensor, block: int) -> Tensor:
    """Return memory for the scale of each block, separate because its place in the bytes of a row may be odd:
    float32[..., n] -> int16[..., b]."""
    return torch.empty((*x.shape[:-1], count(x.shape[-1], block)), dtype=torch.int16, device=x.device)


def decode_sparse(data: Tensor, n: int) -> Tensor:
    out = np.empty(n, np.float32)
    sparse.decode(data.cpu().numpy(), out)
    return torch.from_numpy(out).to(data.device)


IN_TORCH: dict[str, TorchCodec] = {
    fp32.NAME: TorchCodec(encode_fp32, decode_fp32),
    bf16.NAME: TorchCodec(encode_bf16, decode_bf16),
    int8.NAME: TorchCodec(encode_int8, decode_int8),
    int4.NAME: TorchCodec(encode_int4, decode_int4),
    two_bit.NAME: TorchCodec(encode_two_bit, decode_two_bit),
    ternary.NAME: TorchCodec(encode_ternary, decode_ternary),
    sparse.NAME: TorchCodec(encode_sparse, decode_sparse),
}
