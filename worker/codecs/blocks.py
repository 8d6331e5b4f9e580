"""What the block codecs share, in torch: the same bits as `protocol/codecs/blocks.py`, on any device."""

import torch
from torch import Tensor

from protocol.codecs.blocks import MAX_SCALE_BITS, MIN_SCALE_BITS
from protocol.errors import CodecError


def unpack_scales(data: Tensor) -> Tensor:
    """uint8[2b] -> float32[b]."""
    return data.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).view(torch.float32)


def scaled(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """codes · scales, int8[n] by float32[b] -> float32[n]."""
    full = len(codes) // block * block
    out = codes.to(torch.float32)
    out[:full].view(-1, block).mul_(scales[: full // block, None])
    out[full:].mul_(scales[full // block :])
    return out


def encode_absmax(name: str, x: Tensor, most: int, block: int, scales: Tensor, codes: Tensor) -> None:
    """float32[n] -> int16[b] (bit patterns), int8[n]."""
    full = len(x) // block * block
    if full:
        rows = codes[:full].view(-1, block)
        _encode_rows(name, x[:full].view(-1, block), most, scales[: full // block], rows)
    if full < len(x):
        _encode_rows(name, x[full:].view(1, -1), most, scales[full // block :], codes[full:].view(1, -1))


def _encode_rows(name: str, x: Tensor, most: int, scales: Tensor, codes: Tensor) -> None:
    """float32[b, k] -> int16[b] (bit patterns), int8[b, k]."""
    values = x.abs()
    absmax = values.amax(dim=1)  # NaN wherever a block has one
    # A tensor, because CUDA divides by a Python number as a multiplication by its reciprocal: another rounding.
    divisor = torch.tensor(float(most), device=x.device)
    # The pattern of a finite value plus 0xFFFF fits int32; a scale's pattern is positive, so >> shifts in zeros.
    bits = (absmax / divisor).view(torch.int32).add_(0xFFFF).bitwise_right_shift_(16).clamp_(min=MIN_SCALE_BITS)
    if not bool(torch.isfinite(absmax).all()) or bool((bits > MAX_SCALE_BITS).any()):
        raise CodecError(f"{name}: the values contain NaN, infinity or more than {most} · 2^120")
    scales.copy_(bits)
    scale = bits.bitwise_left_shift_(16).view(torch.float32)
    torch.mul(x, scale.reciprocal()[:, None], out=values)
    codes.copy_(values.round_())
