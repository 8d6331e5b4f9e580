"""sparse in torch; `protocol/codecs/sparse.py` describes the format.

The device finds the largest values; these few are then packed by the reference itself.
"""

import numpy as np
import torch
from torch import Tensor

from protocol.codecs import sparse as reference
from protocol.codecs.sparse import BLOCK, EVERY, most, size


def encode(x: Tensor) -> Tensor:
    indices = _largest(x)
    out = np.empty(size(len(x)), np.uint8)
    reference.pack(x[indices].cpu().numpy(), indices.cpu().numpy(), len(x), out)
    return torch.from_numpy(out).to(x.device)


def _largest(x: Tensor) -> Tensor:
    """Return the indices of each block's largest magnitudes, ascending, the first of equal ones: int64[most(n)]."""
    places = torch.arange(len(x), device=x.device)
    keys = x.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64).mul_(BLOCK).sub_(places % BLOCK)
    full = len(x) // BLOCK * BLOCK
    rows = keys[:full].view(-1, BLOCK).topk(EVERY, dim=1, sorted=False).indices
    indices = [(rows + places[:full:BLOCK, None]).view(-1), keys[full:].topk(most(len(x) - full)).indices + full]
    return torch.cat(indices).sort().values


def decode(data: Tensor, n: int) -> Tensor:
    out = np.empty(n, np.float32)
    reference.decode(data.cpu().numpy(), out)
    return torch.from_numpy(out).to(data.device)
