"""int8 in torch; `protocol/codecs/int8.py` describes the format."""

import torch
from torch import Tensor

from protocol.codecs.blocks import count
from protocol.codecs.int8 import BLOCK, MOST, NAME, size
from worker.codecs import blocks


def encode(x: Tensor) -> Tensor:
    out = torch.empty(size(len(x)), dtype=torch.uint8, device=x.device)
    start = 2 * count(len(x), BLOCK)
    blocks.encode_absmax(NAME, x, MOST, BLOCK, out[:start].view(torch.int16), out[start:].view(torch.int8))
    return out


def decode(data: Tensor, n: int) -> Tensor:
    start = 2 * count(n, BLOCK)
    return blocks.scaled(data[start:].view(torch.int8), blocks.unpack_scales(data[:start]), BLOCK)
