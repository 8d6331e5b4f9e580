"""A model's trainable parameters as fragments: gather them into fp32 vectors, scatter vectors back.

Parameters are taken in `named_parameters` order, tied ones once, those with requires_grad only. Buffers are not
averaged.
"""

import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from protocol.fragments import Layout, TensorSpec
from worker.errors import ModelError
from worker.tuning.side_stream import SideStream

_WHOLE = "and each worker needs the whole model in one process, as it was built (torch.compile and DDP are fine)"


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by the names that they have without torch.compile, DistributedDataParallel and
    DataParallel around the model or parts of it, so that workers with and without them share a run.

    Raises ModelError where two parameters then have one name.
    """
    return _parameters(model, trained=True)


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, otherwise like `trainable_parameters`."""
    return _parameters(model, trained=False)


def _parameters(model: nn.Module, *, trained: bool) -> dict[str, nn.Parameter]:
    within = {path for name, module in model.named_modules() if (path := _path_within(name, module))}
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is not trained:
            continue
        plain = _without(within, name)
        if plain in found:
            raise ModelError(f"two parameters are called {plain}, one of them {name} within its wrapper; rename one")
        found[plain] = parameter
    return found


def _path_within(name: str, module: nn.Module) -> str | None:
    """The path of the module that `module`, of this name, wraps; None where it wraps none."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        child = "module"
    elif _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule"):
        child = "_orig_mod"
    else:
        return None
    return f"{name}.{child}".removeprefix(".")


def _is_a(value: object, module: str, name: str) -> bool:
    """Return True if `value` is of that class, whose module takes seconds to import: until it is, nothing is."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _without(within: set[str], name: str) -> str:
    """The parameter's name less the parts of its path that only a wrapper has put there."""
    paths = accumulate(name.split("."), "{}.{}".format)
    return ".".join(path.rpartition(".")[2] for path in paths if path not in within)


def tensor_specs(model: nn.Module) -> list[TensorSpec]:
    """What the coordinator is told about the model. Raises ModelError for parameters that cannot be averaged here."""
    if any(_is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel") for module in model.modules()):
        raise ModelError(f"the model is sharded by FullyShardedDataParallel, {_WHOLE}: leave it out")
    parameters = trainable_parameters(model)
    if not parameters:
        raise ModelError("the model has no trainable parameters")
    for name, parameter in parameters.items():
        if _is_a(parameter, "torch.distributed.tensor", "DTensor"):
            raise ModelError(
                f"parameter {name} is sharded (a DTensor), {_WHOLE}: leave out fully_shard or parallelize_module"
            )
        if getattr(parameter, "_is_flat_param", False):
            raise ModelError(f"parameter {name} is flattened (a FlatParameter), {_WHOLE}: leave out FSDP")
        if not parameter.is_floating_point():
            raise ModelError(f"parameter {name} is {parameter.dtype}; only floating-point parameters can be averaged")
    return [TensorSpec(name=name, shape=list(parameter.shape)) for name, parameter in parameters.items()]


def _identities(model: nn.Module) -> dict[str, tuple[int, torch.dtype, torch.device]]:
    return {name: (id(each), each.dtype, each.device) for name, each in trainable_parameters(model).items()}


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of `tensor` as it is now, in host memory; page-locked where it comes from a GPU, which
    copies into that by itself, several times as fast."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor.detach())


class Fragments(Protocol):
    """The parameters of a model, fragment by fragment, in the run's layout. Vectors are float32[n], n the fragment's
    elements; θ is the global one, `carry` the progress that no mean has, as a part of the next pseudo-gradient."""

    def __len__(self) -> int: ...

    def gather(self, p: int) -> Tensor:
        """Return a copy of the local parameters, on the model's device."""

    def scatter(self, p: int, vector: Tensor) -> None:
        """Write `vector` into the model, cast to each parameter's dtype."""

    def rebase(self, p: int, theta: Tensor, carry: Tensor | None) -> None:
        """Write θ − carry into the model: what the inner steps start from."""

    def pseudo_gradient(
        self, p: int, theta: Tensor, carry: Tensor | None = None, local: Tensor | None = None, after: Any = None
    ) -> Tensor:
        """Return Δ = θ_global − θ_local, in host memory; so defined, the outer optimizer descends.

        θ_local is that of the model now, or `local`, which `gather` gave before; `after` is what `mark` gave after
        that. θ_global is taken as the model started from it, cast to its own dtype, and `carry`, which `rebase` was
        given, is part of Δ exactly: so neither the rounding of a bf16 model nor that of its rebase is mistaken for
        progress or swallows some.
        """

    def progress_since(self, p: int, local: Tensor) -> Tensor:
        """Return `local` − θ_local in host memory; `local`, which `gather` gave before, is used up."""

    def norm(self) -> float:
        """The norm of all parameters together, in fp32: not finite where one of them is not."""

    def check(self) -> None:
        """Raise ModelError where the model has other parameters by now than those that are gathered here."""

    def mark(self) -> Any:
        """Return a mark of what the calling thread has begun on the device so far, for another thread to wait for."""

    def in_host_memory(self, vector: Tensor) -> Tensor:
        """Return `vector`, or on a GPU a copy of it as it is now."""


class DenseFragments:
    """The fragments of a model whose parameters are plain tensors, each of them whole on one device."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model, self._found = model, _identities(model)
        self._parameters = list(trainable_parameters(model).values())
        self._slices = layout.fragments
        self.device = self._parameters[0].device
        self._side_stream = SideStream(self.device)

    def __len__(self) -> int:
        return len(self._slices)

    @torch.no_grad()
    def gather(self, p: int) -> Tensor:
        parts = [parameter.reshape(-1)[stretch].float() for parameter, stretch, _ in self._stretches(p)]
        return torch.cat(parts)

    @torch.no_grad()
    def norm(self) -> float:
        norms = [torch.linalg.vector_norm(parameter, dtype=torch.float32) for parameter in self._parameters]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def check(self) -> None:
        now = _identities(self._model)
        if now != self._found:
            name = next(name for name in self._found | now if self._found.get(name) != now.get(name))
            raise ModelError(
                f"the model's parameters were changed after the run was joined, {name} for one: replaced, frozen, or "
                "put into another dtype or onto another device; do that before DiLoCo is made"
            )

    @torch.no_grad()
    def scatter(self, p: int, vector: Tensor) -> None:
        for parameter, stretch, part in self._stretches(p):
            self._write(parameter, stretch, vector[part])

    @torch.no_grad()
    def pseudo_gradient(
        self, p: int, theta: Tensor, carry: Tensor | None = None, local: Tensor | None = None, after: Any = None
    ) -> Tensor:
        with self._side_stream.beside(self.mark() if after is None else after):
            delta = torch.empty(len(theta), dtype=torch.float32, device=self.device)
            for parameter, stretch, part in self._stretches(p):
                start = self._start(parameter, theta, carry, part)
                reached = parameter.reshape(-1)[stretch].float() if local is None else local[part]
                torch.sub(start.float(), reached, out=delta[part])
            return self.in_host_memory(delta if carry is None else delta.add_(carry.to(self.device)))

    @torch.no_grad()
    def progress_since(self, p: int, local: Tensor) -> Tensor:
        for parameter, stretch, part in self._stretches(p):
            local[part].sub_(parameter.reshape(-1)[stretch].float())
        return self.in_host_memory(local)

    @torch.no_grad()
    def rebase(self, p: int, theta: Tensor, carry: Tensor | None) -> None:
        for parameter, stretch, part in self._stretches(p):
            self._write(parameter, stretch, self._start(parameter, theta, carry, part))

    def in_host_memory(self, vector: Tensor) -> Tensor:
        return vector if vector.device.type == "cpu" else host_copy(vector)

    def mark(self) -> Any:
        return self._side_stream.mark()

    @staticmethod
    def _write(parameter: nn.Parameter, stretch: slice, values: Tensor) -> None:
        flat = parameter.detach().reshape(-1)  # a view, or a copy where the parameter's memory has gaps
        flat[stretch].copy_(values)
        if not parameter.is_contiguous():
            parameter.copy_(flat.view_as(parameter))

    def _start(self, parameter: Tensor, theta: Tensor, carry: Tensor | None, part: slice) -> Tensor:
        """Return what the training of this part of a parameter starts from, in the parameter's dtype."""
        cast = theta[part].to(self.device).to(parameter.dtype)
        return cast if carry is None else (cast.float() - carry[part].to(self.device)).to(parameter.dtype)

    def _stretches(self, p: int) -> Iterator[tuple[nn.Parameter, slice, slice]]:
        """Yield each slice of fragment p: its parameter, where it is in there (flattened), and where in the vector."""
        position = 0
        for stretch in self._slices[p]:
            length = stretch.stop - stretch.start
            yield (
                self._parameters[stretch.tensor],
                slice(stretch.start, stretch.stop),
                slice(position, position + length),
            )
            position += length
