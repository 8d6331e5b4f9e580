"""torch.compile of a model, in place: its parameters keep their names."""

import torch
from torch import nn

from worker.errors import BoxError
from worker.inner.head import Head


def compile_model(model: nn.Module, head: Head | None, device: torch.device) -> Head | None:
    """Compile the forward pass, at its first call and for every new shape; return what has taken `head`'s place.

    Raises BoxError where this machine cannot compile at all.
    """
    _probe_compiler(device)
    if head is None:
        model.compile()
        return None
    head.body.compile()
    return head._replace(cross_entropy=torch.compile(head.cross_entropy), compiled=True)


def _probe_compiler(device: torch.device) -> None:
    try:
        torch.compile(_twice)(torch.ones(1, device=device))
    except Exception as error:  # of torch's compilers, the C++ compiler or triton: they have no base in common
        told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise BoxError(
            f"--compile: torch.compile does not work on this machine ({told}); install a C++ compiler and, for a GPU, "
            "triton, or leave it out"
        ) from error


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x + x
