"""How a model is executed on this machine: activation checkpointing, torch.compile, and the FLOPs of a step."""

import logging
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from worker.errors import BoxError
from worker.inner.loss import Head
from worker.inner.micro_batch import is_out_of_memory
from worker.inner.precision import Precision, autocast
from worker.models.building import logits_of

log = logging.getLogger(__name__)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of unknown architecture: the modules in its longest ModuleList or Sequential.

    Empty if no list has two modules or more.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    layers: list[nn.Module] = list(max(lists, key=len, default=()))
    return layers if len(layers) > 1 else []


def checkpoint_activations(model: nn.Module) -> None:
    """Let the layers keep only their inputs; the backward pass computes their activations again.

    Uses the model's own method if it has one (transformers), otherwise wraps each of `layers_of`. Raises BoxError if
    the model has neither.
    """
    # transformers 5.23 renamed the method. A custom model has neither.
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
            f"--activation-checkpointing: {type(model).__name__} has no torch.nn.ModuleList or Sequential of layers. "
            "Omit the option, or call torch.utils.checkpoint in the model."
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_model(model: nn.Module, head: Head | None, device: torch.device) -> Head | None:
    """Compile the model's forward pass in place, so that its parameters keep their names; return the compiled head.

    Compilation happens at the first call and for every new shape. Raises BoxError if torch.compile does not work on
    this machine.
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
    except Exception as error:  # torch's compilers, the C++ compiler and triton share no base class
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise BoxError(
            f"--compile: torch.compile does not work on this machine ({cause}). Install a C++ compiler and, for a GPU, "
            "triton, or omit the option."
        ) from error


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    """Two products: of queries and keys, and of the weights and values. Shapes are [batch, heads, length, width], where
    several heads of the queries may share one of the keys and values, which torch's own formula refused before 2.13."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward_flops(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    """Five products: the scores again, and the gradients of the weights, the values, the queries and the keys."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}"): formula
    for kernel in ("flash", "efficient", "cudnn")
    for suffix, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
}


def flops_per_token(model: nn.Module, length: int, precision: Precision, device: torch.device) -> float | None:
    """Return the FLOPs per token of a forward and backward pass over sequences of `length`, for the model FLOPs
    utilisation; None if one sequence does not fit into memory, or torch cannot count them.

    torch counts the matrix products and the attention of one sequence; a causal mask is not subtracted (PaLM, arXiv
    2204.02311, appendix B). Call it before activations are checkpointed or the model is compiled: recomputation does
    not count.
    """
    was_training = model.training
    model.eval()
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    try:
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter, autocast(precision, device):
            logits_of(model, tokens).float().sum().backward()
    except AssertionError as error:  # torch's counter does not know the shapes; a model's own comes again as it trains
        log.warning("the FLOPs of this model cannot be counted, so the MFU is not reported: %s", error)
        return None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return float(counter.get_total_flops()) / length
