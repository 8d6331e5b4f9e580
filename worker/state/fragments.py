"""A model's trainable parameters as fragments: gather them into fp32 vectors, scatter vectors back.

Parameters are taken in `named_parameters` order, tied ones once, those with requires_grad only. Buffers are not
averaged.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from protocol.fragments import Layout, TensorSpec
from worker.errors import ModelError
from worker.tuning.memory import HostMemory
from worker.tuning.side_stream import SideStream


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def tensor_specs(model: nn.Module) -> list[TensorSpec]:
    """What the coordinator is told about the model. Raises ModelError for parameters that are not real floats."""
    parameters = trainable_parameters(model)
    if not parameters:
        raise ModelError("the model has no trainable parameters")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ModelError(f"parameter {name} is {parameter.dtype}; only floating-point parameters can be averaged")
    return [TensorSpec(name=name, shape=list(parameter.shape)) for name, parameter in parameters.items()]


class Fragments:
    """The fragments of one model, in the run's layout. Vectors are float32[n], n the fragment's elements."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._parameters = list(trainable_parameters(model).values())
        self._slices = layout.fragments
        self.device = self._parameters[0].device
        self.memory = HostMemory(pinned=self.device.type == "cuda")
        self.side_stream = SideStream(self.device)

    def __len__(self) -> int:
        return len(self._slices)

    @torch.no_grad()
    def gather(self, p: int) -> Tensor:
        """Fragment p of the model as it is now, on the model's device; a copy."""
        parts = [parameter.reshape(-1)[piece].float() for parameter, piece, _ in self._pieces(p)]
        return torch.cat(parts, out=self._empty(sum(len(part) for part in parts)))

    @torch.no_grad()
    def norm(self) -> float:
        """Of all parameters together, in fp32: not finite where one of them is not."""
        norms = [torch.linalg.vector_norm(parameter, dtype=torch.float32) for parameter in self._parameters]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    @torch.no_grad()
    def scatter(self, p: int, vector: Tensor) -> None:
        """Write fragment p into the model, cast to each parameter's dtype."""
        for parameter, piece, part in self._pieces(p):
            self._write(parameter, piece, vector[part])

    @torch.no_grad()
    def pseudo_gradient(
        self, p: int, theta: Tensor, carry: Tensor | None = None, local: Tensor | None = None
    ) -> Tensor:
        """Δ = θ_global − θ_local of fragment p, on the model's device; so defined, the outer optimizer descends.
        θ_local is that of the model now, or `local`, which `gather` gave before.

        `carry` is what `rebase` was given: it is part of Δ, exactly. θ_global is taken as the model started from it,
        cast to its own dtype: so neither the rounding of a bf16 model nor that of its rebase is mistaken for progress
        or swallows some.
        """
        delta = self._empty(len(theta))
        for parameter, piece, part in self._pieces(p):
            start = self._start(parameter, theta, carry, part)
            reached = parameter.reshape(-1)[piece].float() if local is None else local[part]
            torch.sub(start.float(), reached, out=delta[part])
        return delta if carry is None else delta.add_(carry.to(self.device))

    @torch.no_grad()
    def progress_since(self, p: int, local: Tensor) -> Tensor:
        """`local`, which `gather` gave before, becomes `local` − θ_local and is returned."""
        for parameter, piece, part in self._pieces(p):
            local[part].sub_(parameter.reshape(-1)[piece].float())
        return local

    @torch.no_grad()
    def rebase(self, p: int, theta: Tensor, carry: Tensor | None) -> None:
        """Start from `theta`, plus the progress −`carry` that has not been averaged yet."""
        for parameter, piece, part in self._pieces(p):
            if carry is None:
                self._write(parameter, piece, theta[part])
            elif parameter.dtype == theta.dtype and parameter.is_contiguous() and self.device.type == "cpu":
                torch.sub(theta[part], carry[part], out=parameter.detach().view(-1)[piece])
            else:
                self._write(parameter, piece, self._start(parameter, theta, carry, part))

    def in_host_memory(self, vector: Tensor) -> Tensor:
        """`vector`, or on a GPU a copy of it as it is now."""
        return vector if vector.device.type == "cpu" else self.memory.copy(vector)

    def _empty(self, n: int) -> Tensor:
        """float32[n] on the model's device."""
        if self.device.type == "cpu":
            return self.memory.empty((n,))
        return torch.empty(n, dtype=torch.float32, device=self.device)

    @staticmethod
    def _write(parameter: nn.Parameter, piece: slice, values: Tensor) -> None:
        flat = parameter.detach().reshape(-1)  # a view, or a copy where the parameter's memory has gaps
        flat[piece].copy_(values)
        if not parameter.is_contiguous():
            parameter.copy_(flat.view_as(parameter))

    def _start(self, parameter: Tensor, theta: Tensor, carry: Tensor | None, part: slice) -> Tensor:
        """What the training of this part of a parameter starts from, in the parameter's dtype."""
        cast = theta[part].to(self.device).to(parameter.dtype)
        return cast if carry is None else (cast.float() - carry[part].to(self.device)).to(parameter.dtype)

    def _pieces(self, p: int) -> Iterator[tuple[nn.Parameter, slice, slice]]:
        """Of each slice of fragment p: its parameter, where it lies in there (flattened), and where in the vector."""
        position = 0
        for piece in self._slices[p]:
            length = piece.stop - piece.start
            yield self._parameters[piece.tensor], slice(piece.start, piece.stop), slice(position, position + length)
            position += length
