"""Gradient clipping."""

from torch import Tensor, nn

from protocol.spec.sections import InnerSpec


def clip_gradients(parameters: list[nn.Parameter], inner: InnerSpec) -> Tensor | None:
    """Scale the gradients down to the run's global L2 norm, and return what it was, a scalar on the device; None where
    the run does not clip. Nothing waits for the device."""
    return None if inner.clip_norm == "none" else nn.utils.clip_grad_norm_(parameters, inner.clip_norm)
