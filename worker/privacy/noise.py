"""Gaussian noise that nobody can predict, and that its key reproduces.

Noise only protects if nobody can remove it. The generators of a training framework are no secrets: torch's on the CPU
uses 32 bits of its seed, which can be found by trial from a few known values of a pseudo-gradient (in the row of an
embedding that no text has used, for example). So the bits come from BLAKE3 with a secret 256-bit key, read as a stream,
and the values from these by the method of Box and Muller (1958) in fp64.

Values are added in fp64 and rounded to fp32 once. That does not defend against what the lowest bits of floating-point
sums reveal (Mironov 2012, doi:10.1145/2382196.2382264).
"""

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

KEY_BYTES = 32
_AT_ONCE = 1 << 17  # values, which stay in the cache; even, because they come in pairs
_CONTEXT = b"outerstep: noise of one contribution"

F64 = npt.NDArray[np.float64]


def with_noise(values: Tensor, deviation: float, key: bytes) -> Tensor:
    """Return `values` plus independent Gaussian noise of this standard deviation on each, float32[n] in host memory.
    The same key gives the same noise, so a key is for one set of values."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a noise key has {KEY_BYTES} bytes, not {len(key)}")
    stream = blake3(_CONTEXT, key=key)
    out = torch.empty(len(values), dtype=torch.float32, device="cpu")
    result, given = out.numpy(), values.detach().numpy()
    for start in range(0, len(result), _AT_ONCE):
        part = given[start : start + _AT_ONCE].astype(np.float64)
        pairs = -(-len(part) // 2)
        words = np.frombuffer(stream.digest(16 * pairs, seek=8 * start), "<u8")
        part += deviation * _normal(words)[: len(part)]
        result[start : start + len(part)] = part
    return out


def _normal(words: npt.NDArray[np.uint64]) -> F64:
    """Return standard normal values, float64[2n], of random uint64[2n]."""
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
    first, second = uniform.reshape(2, -1)
    radius = np.sqrt(-2.0 * np.log1p(-first))
    angle = 2.0 * np.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
