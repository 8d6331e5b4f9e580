"""Shared by all block codecs in torch: the same bits as `protocol/codecs/blocks.py`, on any device."""

import torch
from torch import Tensor

from protocol.codecs.blocks import MAX_SCALE_BITS, MIN_SCALE_BITS, count
from protocol.errors import CodecError


def unpack_scales(data: Tensor) -> Tensor:
    """Return the scales uint8[2b] as float32[b]."""
    return data.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).view(torch.float32)


def scaled(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return codes · scales, int8[n] by float32[b] -> float32[n]."""
    full = len(codes) // block * block
    out = codes.to(torch.float32)
    out[:full].view(-1, block).mul_(scales[: full // block, None])
    out[full:].mul_(scales[full // block :])
    return out


def encode_absmax(name: str, x: Tensor, most: int, block: int, scales: Tensor, codes: Tensor) -> None:
    """Encode float32[..., n] -> int16[..., b] (the scales' bit patterns), int8[..., n]."""
    n = x.shape[-1]
    full = n // block * block
    if full:
        rows, of_rows = x[..., :full].unflatten(-1, (-1, block)), codes[..., :full].unflatten(-1, (-1, block))
        _encode_rows(name, rows, most, scales[..., : full // block], of_rows)
    if full < n:
        _encode_rows(name, x[..., None, full:], most, scales[..., full // block :], codes[..., None, full:])


def _encode_rows(name: str, x: Tensor, most: int, scales: Tensor, codes: Tensor) -> None:
    """Encode b blocks of k values: float32[..., b, k] -> int16[..., b] (the scales' bit patterns), int8[..., b, k]."""
    values = x.abs()
    absmax = values.amax(dim=-1)  # NaN if a block contains one
    # A tensor, because CUDA divides by a Python number by multiplying with its reciprocal, which rounds differently.
    divisor = torch.tensor(float(most), dtype=torch.float32, device=x.device)
    # The pattern of a finite value plus 0xFFFF fits int32; a scale's pattern is positive, so >> shifts in zeros.
    bits = (absmax / divisor).view(torch.int32).add_(0xFFFF).bitwise_right_shift_(16).clamp_(min=MIN_SCALE_BITS)
    if not bool((torch.isfinite(absmax) & (bits <= MAX_SCALE_BITS)).all()):
        raise CodecError(f"{name}: the values contain NaN, infinity or a magnitude above {most} · 2^120")
    scales.copy_(bits)
    scale = bits.bitwise_left_shift_(16).view(torch.float32)
    torch.mul(x, scale.reciprocal()[..., None], out=values)
    codes.copy_(values.round_())


def means(name: str, x: Tensor, block: int) -> Tensor:
    """Return the mean of each block of non-negative values, float32[..., n] -> float32[..., b]."""
    n = x.shape[-1]
    blocks = count(n, block)
    sums = torch.zeros((*x.shape[:-1], blocks * block), dtype=torch.float32, device=x.device)
    sums[..., :n] = x
    sums = sums.unflatten(-1, (blocks, block))
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    result = sums[..., 0]
    if not bool(torch.isfinite(result).all()):
        raise CodecError(f"{name}: the values contain NaN or infinity, or their sum is too large for fp32")
    # A tensor, as in _encode_rows.
    counts = torch.full((blocks,), float(block), dtype=torch.float32, device=x.device)
    counts[-1] = float(n - (blocks - 1) * block)
    return result / counts


def rms(name: str, x: Tensor, block: int) -> Tensor:
    """Return the root mean square of each block, float32[..., n] -> float32[..., b]."""
    return means(name, x * x, block).sqrt_()


def pack_scales(name: str, values: Tensor, scales: Tensor) -> Tensor:
    """Return the scales float32[..., b], rounded toward zero and at least 2^-126, and write them to `scales`,
    int16[..., b]."""
    bits = values.view(torch.int32).bitwise_right_shift(16).clamp_(min=MIN_SCALE_BITS)
    if bool((bits > MAX_SCALE_BITS).any()):
        raise CodecError(f"{name}: the values are too large: a block's scale may be at most 2^120")
    scales.copy_(bits)
    return bits.bitwise_left_shift_(16).view(torch.float32)


def of_each(scales: Tensor, block: int, n: int) -> Tensor:
    """Return the scale of each value, float32[..., b] -> float32[..., n]."""
    return scales.repeat_interleave(block, dim=-1)[..., :n]


def pack_pairs(codes: Tensor, out: Tensor) -> None:
    """Pack 2-bit codes uint8[..., n] -> uint8[..., h], h = ceil(n / 4)."""
    h = out.shape[-1]
    out.copy_(codes[..., :h])
    for k in (1, 2, 3):
        part = codes[..., k * h : (k + 1) * h]
        out[..., : part.shape[-1]].bitwise_or_(part * 4**k)


def unpack_pairs(data: Tensor, n: int) -> Tensor:
    """Reverse `pack_pairs`: int8[n], each code in the two upper bits; the lower bits are 0."""
    parts = torch.cat([data * 64, data * 16, data * 4, data])
    return parts[:n].bitwise_and_(0xC0).view(torch.int8)
