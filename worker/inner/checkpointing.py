"""Activation checkpointing: the backward pass makes a layer's activations again rather than keep them."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from worker.errors import BoxError
from worker.inner.layers import layers_of


def checkpoint_activations(model: nn.Module) -> None:
    """Let the model's layers keep their inputs only: transformers' own way, or else every module of its longest list.

    Raises BoxError for a model without layers that torch or transformers could tell.
    """
    # transformers 5.23 renamed it; neither is there in a model of one's own.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if enable := getattr(model, name, None):
            try:
                enable({"use_reentrant": False})
            except ValueError as error:
                raise BoxError(f"--activation-checkpointing: {error}") from error
            return
    layers = layers_of(model)
    if not layers:
        raise BoxError(
            f"--activation-checkpointing: {type(model).__name__} has no torch.nn.ModuleList or Sequential of layers; "
            "leave it out, or call torch.utils.checkpoint in the model"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
