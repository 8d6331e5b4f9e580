"""Gaussian noise that nobody can foretell, and that its key gives again.

Noise protects as long as nobody can take it away. A training framework's generators are no secrets: torch's on the CPU
takes 32 bits of its seed, and whoever knows a few values of a pseudo-gradient (of an embedding's row that no text has
used, for example) finds them by trying. So bits come from BLAKE3 with a secret key of 256 bits, read as a stream, and
values from these by Box and Muller's method (1958) in fp64.

Values are added in fp64 and rounded to fp32 once. That is no defence against what can be learnt from the lowest bits of
sums in floating point (Mironov 2012, doi:10.1145/2382196.2382264).
"""

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

KEY_BYTES = 32
_AT_ONCE = 1 << 17  # values, which stay in the cache; even, as they come in pairs
_CONTEXT = b"outerstep: noise of one contribution"

F64 = npt.NDArray[np.float64]


def with_noise(values: Tensor, deviation: float, key: bytes) -> Tensor:
    """Return float32[n] in host memory: `values` and independent Gaussian noise of this standard deviation on each of
    them. The same key gives the same noise, so it is for these values alone."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of noise has {KEY_BYTES} bytes, not {len(key)}")
    stream = blake3(_CONTEXT, key=key)
    out = torch.empty(len(values), dtype=torch.float32)
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
