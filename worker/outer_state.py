"""The outer state that this worker holds: θ_global and the outer momentum u of every fragment, in host memory.

The same published bytes and the same arithmetic make it bit-identical on every worker and on the coordinator; the state
digests prove that, fragment by fragment, before every step.
"""

import numpy as np
import torch
from torch import Tensor

from protocol.digest import Buffer, StateHash, model_digest
from protocol.fragments import Layout
from protocol.spec import OuterSpec
from protocol.wire import DeltaHeader, Payload, StateHeader
from worker.codecs import unpack_payload
from worker.errors import Resync
from worker.outer_step import outer_step

_HOST = torch.device("cpu")


def tensor_bytes(tensor: Tensor) -> Buffer:
    """The memory of a contiguous CPU tensor, not copied."""
    return tensor.numpy().view(np.uint8).data


class OuterState:
    """State `round` of the run; `round` is None while there is none, or while fragments are at different rounds.

    Different fragments may be loaded and stepped by different threads at once.
    """

    def __init__(self, layout: Layout, outer: OuterSpec, *, pin_memory: bool) -> None:
        self.round: int | None = None
        self.theta = [torch.zeros(n, dtype=torch.float32, pin_memory=pin_memory) for n in layout.elements]
        self.momentum = [torch.zeros(n, dtype=torch.float32, pin_memory=pin_memory) for n in layout.elements]
        self.digests = [b""] * len(layout.fragments)
        self._outer = outer

    def __len__(self) -> int:
        return len(self.theta)

    def digest(self) -> bytes:
        """One digest of the whole outer state."""
        return model_digest(self.digests)

    def set(self, p: int, theta: Tensor, momentum: Tensor | None) -> None:
        """Fragment p becomes `theta` and `momentum` (None: zero, as in state 0), float32[n] each."""
        self.theta[p].copy_(theta)
        if momentum is None:
            self.momentum[p].zero_()
        else:
            self.momentum[p].copy_(momentum)
        self._rehash(p)

    def load(self, p: int, payload: Payload) -> None:
        """Fragment p from a payload of kind `state`: θ, then u."""
        if not isinstance(payload.header, StateHeader):
            raise Resync(f"fragment {p} of a checkpoint is a payload of kind {payload.header.kind!r}, not 'state'")
        values = unpack_payload(payload, _HOST)
        n = len(self.theta[p])
        if len(values) != 2 * n:
            raise Resync(f"fragment {p} of a checkpoint has {len(values)} values, the layout says {2 * n}")
        self.set(p, values[:n], values[n:])

    def step(self, p: int, payload: Payload) -> Tensor:
        """Fragment p one outer step on; the delta, float32[n]. Raises Resync where it is for another outer state than
        this one."""
        header = payload.header
        if not isinstance(header, DeltaHeader) or header.elements != len(self.theta[p]) or header.fragment != p:
            raise Resync(
                f"what came as the delta of fragment {p} is not one: {header.kind}, {header.elements} elements"
            )
        if header.base != self.digests[p]:
            raise Resync(
                f"the delta of round {header.round}, fragment {p} is for outer state {header.base.hex()[:12]}, "
                f"this worker holds {self.digests[p].hex()[:12]}"
            )
        delta = unpack_payload(payload, _HOST)
        lr, beta = self._outer.learning_rate, self._outer.momentum
        outer_step(self.theta[p], self.momentum[p], delta, learning_rate=lr, beta=beta)
        self._rehash(p)
        return delta

    def is_sound(self, p: int) -> bool:
        """Whether fragment p is what was loaded and stepped. A bit that flips in memory must not get into an average;
        `digests[p]` tells of it from now on."""
        known = self.digests[p]
        self._rehash(p)
        return self.digests[p] == known

    def _rehash(self, p: int) -> None:
        state_hash = StateHash()
        state_hash.update(tensor_bytes(self.theta[p]), tensor_bytes(self.momentum[p]))
        self.digests[p] = state_hash.digest()
