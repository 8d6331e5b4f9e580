"""The size of a model of transformers, found out without building it: on torch's meta device, which has no memory."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registering
from transformers import AutoModelForCausalLM, PreTrainedConfig

from protocol.messages import MAX_TENSORS
from protocol.spec.model import MAX_LAYERS
from worker.errors import ModelError
from worker.models.refusing import refusing


class _TooMany(Exception):
    """More tensors than a run can have."""


def check_size(config: PreTrainedConfig, said: str, most: int, attention: str) -> None:
    """Raise ModelError if the model of `config` has more than `most` elements in its parameters and buffers, more than
    MAX_LAYERS layers, or more than MAX_TENSORS tensors. `said`: what the spec calls it."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ModelError(f"{said} has {layers:,} layers; at most {MAX_LAYERS:,} are allowed")
    try:
        with (
            refusing(f"transformers cannot build {said}"),
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            _at_most(MAX_TENSORS),
        ):
            model: nn.Module = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention, trust_remote_code=False
            )
    except _TooMany:
        raise ModelError(f"{said} has more than {MAX_TENSORS:,} tensors, which is all that a run can have") from None
    parameters, buffers = (sum(each.numel() for each in some) for some in (model.parameters(), model.buffers()))
    if parameters + buffers > most:
        beside = f" and buffers of {buffers:,} elements" if buffers > parameters else ""
        raise ModelError(
            f"{said} has {parameters:,} parameters{beside}, {4 * (parameters + buffers) / 1e9:,.1f} GB in fp32; the "
            f"owner of this machine allows {most:,}. If you trust whoever wrote the spec, and memory suffices, add: "
            f"--max-parameters {parameters + buffers}"
        )


@contextmanager
def _at_most(tensors: int) -> Iterator[None]:
    """Raise _TooMany as soon as this thread's modules have more: a model with a million parts takes long to count."""
    thread, found = threading.get_ident(), 0

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> Any:
        nonlocal found
        if tensor is not None and threading.get_ident() == thread:
            found += 1
            if found > tensors:
                raise _TooMany

    hooks = (
        registering.register_module_parameter_registration_hook(count),
        registering.register_module_buffer_registration_hook(count),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
