"""int4 in torch; `protocol/codecs/int4.py` describes the format."""

import torch
from torch import Tensor

from protocol.codecs.blocks import count
from protocol.codecs.int4 import BLOCK, MOST, NAME, size
from worker.codecs import blocks


def encode(x: Tensor) -> Tensor:
    n, start = len(x), 2 * count(len(x), BLOCK)
    out = torch.empty(size(n), dtype=torch.uint8, device=x.device)
    codes = torch.empty(2 * (len(out) - start), dtype=torch.int8, device=x.device)
    codes[n:] = 0
    blocks.encode_absmax(NAME, x, MOST, BLOCK, out[:start].view(torch.int16), codes[:n])
    lower, upper = codes.view(torch.uint8).view(2, -1)
    torch.bitwise_or(lower.bitwise_and_(0x0F), upper.mul_(16), out=out[start:])
    return out


def decode(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, BLOCK)
    packed = data[start:]
    codes = torch.cat([packed * 16, packed]).view(torch.int8).bitwise_right_shift_(4)
    return blocks.scaled(codes[:n], blocks.unpack_scales(data[:start]), BLOCK)
