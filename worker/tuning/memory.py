"""Host memory that is used again: the pages of new memory cost several times what it costs to write into them."""

import math
import weakref
from collections import defaultdict

import torch
from torch import Tensor


class HostMemory:
    """Gives out tensors in host memory. Once nothing refers to one any more, views and threads included, its memory
    serves the next of that size; so no more is kept than was in use at one time. Thread-safe.

    `pinned`: the system keeps it in place, so that a GPU copies from and to it by itself, several times as fast.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # bytes -> uint8[bytes]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor with anything in it."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=self._pinned)
        lent = memory.numpy()  # every tensor made of it keeps this array alive
        weakref.finalize(lent, free.append, memory).atexit = False
        return torch.from_numpy(lent)[:size].view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` as it is now, wherever it is."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
