"""bf16 in torch; `protocol/codecs/bf16.py` describes the format."""

import torch
from torch import Tensor

from protocol.errors import CodecError


def encode(x: Tensor) -> Tensor:
    half = x.to(torch.bfloat16)
    # Rounding can make infinity of a finite value, never the reverse: looking at the result is enough.
    if not bool(torch.isfinite(half).all()):
        raise CodecError("bf16: the values contain NaN, infinity or values too large for bf16")
    return half.view(torch.uint8)


def decode(data: Tensor, n: int) -> Tensor:
    return data.view(torch.bfloat16).to(torch.float32)
