"""Gradient clipping."""

from torch import nn

from protocol.spec import InnerSpec


def clip_gradients(parameters: list[nn.Parameter], inner: InnerSpec) -> None:
    """Scale the gradients down to the run's global L2 norm, unless it has none; nothing waits for the device."""
    if inner.clip_norm != "none":
        nn.utils.clip_grad_norm_(parameters, inner.clip_norm)
