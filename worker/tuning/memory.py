"""Reuse of host memory: new pages cost several times what it costs to write into them."""

import math
import weakref
from collections import defaultdict

import torch
from torch import Tensor


class HostMemory:
    """An allocator of tensors in host memory, which it uses again. Thread-safe.

    Once nothing refers to a tensor any more, views and threads included, its memory serves the next one of that size;
    so it never holds more than was in use at one time. `pinned`: page-locked memory, from and to which a GPU copies by
    itself, several times as fast.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # bytes -> uint8[bytes]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor."""
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
