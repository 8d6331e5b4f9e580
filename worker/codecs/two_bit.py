"""2bit in torch; `protocol/codecs/two_bit.py` describes the format."""

import torch
from torch import Tensor

from protocol.codecs.blocks import count
from protocol.codecs.two_bit import BETWEEN, BLOCK, LARGE, NAME, PER_RMS, SMALL, size
from worker.codecs import blocks


def encode(x: Tensor) -> Tensor:
    n, start = len(x), 2 * count(len(x), BLOCK)
    out = torch.empty(size(n), dtype=torch.uint8, device=x.device)
    rms = blocks.rms(NAME, x, BLOCK) * float(PER_RMS)
    scales = blocks.pack_scales(NAME, rms, out[:start].view(torch.int16))
    codes = (x.abs() >= blocks.of_each(scales * float(BETWEEN), BLOCK, n)).to(torch.uint8)
    codes.bitwise_or_((x < 0).to(torch.uint8).mul_(2))
    blocks.pack_pairs(codes, out[start:])
    return out


def decode(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, BLOCK)
    codes = blocks.unpack_pairs(data[start:], n)
    levels = codes.bitwise_and(0x40).bitwise_right_shift_(6).mul_(LARGE - SMALL).add_(SMALL)
    signs = codes.bitwise_right_shift_(7)  # -1 or 0
    return blocks.scaled(levels.bitwise_xor_(signs).sub_(signs), blocks.unpack_scales(data[:start]), BLOCK)
