"""fp32 in torch; `protocol/codecs/fp32.py` describes the format."""

import torch
from torch import Tensor

from protocol.errors import CodecError


def encode(x: Tensor) -> Tensor:
    if not bool(torch.isfinite(x).all()):
        raise CodecError("fp32: the values contain NaN or infinity")
    return x.contiguous().view(torch.uint8)


def decode(data: Tensor, n: int) -> Tensor:
    return data.view(torch.float32)
