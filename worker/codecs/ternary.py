"""ternary in torch; `protocol/codecs/ternary.py` describes the format."""

import torch
from torch import Tensor

from protocol.codecs.blocks import count
from protocol.codecs.ternary import BLOCK, LEVEL, NAME, size
from worker.codecs import blocks

_LEVEL = float(LEVEL)


def encode(x: Tensor) -> Tensor:
    n, start = len(x), 2 * count(len(x), BLOCK)
    out = torch.empty(size(n), dtype=torch.uint8, device=x.device)
    levels = blocks.pack_scales(NAME, blocks.rms(NAME, x, BLOCK) * _LEVEL, out[:start].view(torch.int16))
    threshold, values = blocks.of_each(levels, BLOCK, n), x * _LEVEL
    codes = (values >= threshold).to(torch.uint8)
    codes.bitwise_or_((values <= threshold.neg_()).to(torch.uint8).mul_(3))
    blocks.pack_pairs(codes, out[start:])
    return out


def decode(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, BLOCK)
    codes = blocks.unpack_pairs(data[start:], n).bitwise_right_shift_(6)
    return blocks.scaled(codes, blocks.unpack_scales(data[:start]), BLOCK)
