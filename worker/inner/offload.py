"""Gradients and moments in host memory, for models that are too large for their GPU, as in ZeRO-Offload (arXiv
2101.06840).

The backward pass makes one gradient after the other. Each moves to host memory as soon as it is complete, so the device
never holds more than a few. The optimizers' step streams them back, parameter by parameter, with the moments
(compact.py), and computes on the device: with moments in 8 bits that moves 8 bytes per parameter over PCIe, while a CPU
would have to decode, update and encode them.

Clipping by the global norm stays exact. A step on each gradient as it arrives would come before the norm is known; so
the gradients wait in host memory, their norms are taken on the way there, and the factor is applied on the way back.
For the same reason several micro-batches, and a batch that starts again after memory ran out, work as without it.
"""

import logging
import weakref
from collections.abc import Iterable
from mmap import PAGESIZE

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


def page_locked(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, [elements], that `device` reads and writes directly. torch's own page-locked memory
    would be rounded up to a power of 2. The tensor shares its pages with nothing else, and they are unlocked before
    they are freed: CUDA does not copy memory that is only partly locked ("invalid argument")."""
    if device.type != "cuda" or not elements:
        return torch.zeros(elements, dtype=dtype, device="cpu")
    needed = elements * dtype.itemsize
    locked = -(-needed // PAGESIZE) * PAGESIZE
    memory = np.zeros(locked + PAGESIZE, np.uint8)
    start = -memory.ctypes.data % PAGESIZE
    tensor = torch.from_numpy(memory[start : start + needed]).view(dtype)
    if code := int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), locked, 0)):
        log.warning("host memory cannot be page-locked (CUDA error %s): copies take longer", code)
    else:
        weakref.finalize(memory, _unlock, tensor.data_ptr(), device).atexit = False
    return tensor


def _unlock(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may be under way
    if code := int(torch.cuda.cudart().cudaHostUnregister(address)):
        log.warning("page-locked host memory cannot be unlocked (CUDA error %s)", code)


class HostGradients:
    """The gradients of one inner step, in host memory. From now on, a backward pass leaves no `parameter.grad`: it is
    added to what is held here."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._room: dict[nn.Parameter, Tensor] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}  # float32[], on the device; of what is held
        self._factor: Tensor | None = None
        self._parameters = list(parameters)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        room = self._room.get(parameter)
        if room is None:
            room = self._room[parameter] = page_locked(parameter.numel(), parameter.dtype, parameter.device)
        held = room.view(gradient.shape)
        if parameter in self._norms:  # of an earlier micro-batch
            gradient = gradient + held.to(gradient.device, non_blocking=True)
        self._norms[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        held.copy_(gradient, non_blocking=True)  # what reads it comes later on the same stream

    def clip(self, most: float) -> Tensor | None:
        """Let `piece` return gradients scaled down to the global L2 norm `most`. Return the norm before clipping, a
        scalar on the device; None if there is no gradient."""
        if not self._norms:
            return None
        in_order = [self._norms[each] for each in self._parameters if each in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(in_order))
        self._factor = torch.clamp(most / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_
        return norm

    def has(self, parameter: nn.Parameter) -> bool:
        """Return True if the parameter has a gradient."""
        return parameter in self._norms

    def piece(self, parameter: nn.Parameter, piece: slice | None) -> Tensor:
        """Return a slice of the flattened gradient (None: all of it, in its shape), clipped, fp32 on the device."""
        room = self._room[parameter]
        held = room.view(parameter.shape) if piece is None else room[piece]
        gradient = held.to(parameter.device, torch.float32, non_blocking=True)
        return gradient if self._factor is None else gradient * self._factor

    def drop(self) -> None:
        """Forget the gradients. Their memory is kept for the next step."""
        self._norms.clear()
        self._factor = None
