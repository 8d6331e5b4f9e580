"""Models: the presets, any configuration of transformers, or the user's own function.

Every worker builds the same model from the run spec: its shape must be the same everywhere, and the seed gives all
workers the same initial parameters.
"""

import importlib
import logging
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from protocol.spec import ModelSpec, RunSpec
from worker.errors import ModelError
from worker.models.presets import PRESETS

log = logging.getLogger(__name__)

_SEEDING = threading.Lock()


def build_model(spec: RunSpec, device: torch.device) -> nn.Module:
    """Return the run's model in float32 with its initial parameters, on `device`. Raises ModelError if that fails."""
    # The lock: torch's default generator belongs to the whole process.
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = _factory_model(spec.model) if spec.model.factory else _transformers_model(spec, device)
    return model.to(device)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the model's logits, [batch, length, vocabulary], for token ids int64[batch, length]."""
    output = model(tokens)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def check_vocabulary(model: nn.Module, vocabulary: int) -> None:
    """Raise ModelError if token ids, which are below `vocabulary`, exceed the model's; log what they leave unused.

    Of a model from the user's own function nobody knows how many it has, unless it has a `config` as transformers'.
    """
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(rows, int):
        return
    if rows < vocabulary:
        raise ModelError(
            f"the model's vocab_size = {rows} is too small: the training set has token ids up to {vocabulary - 1}; "
            f"give model.config a vocab_size of {vocabulary} or more, or use another tokenizer"
        )
    if rows > vocabulary:
        unused = f"{rows - vocabulary:,}"
        log.info(
            "of the model's %d token ids the tokenizer has %d: %s rows are never trained", rows, vocabulary, unused
        )


def _transformers_model(spec: RunSpec, device: torch.device) -> nn.Module:
    config = _config(spec)
    if getattr(config, "vocab_size", None) is None:
        raise ModelError("model.config has no vocab_size: it is not the configuration of a causal language model")
    config.use_cache = False
    # On CPUs scaled_dot_product_attention costs twice the step time of plain matrix products.
    attention = "eager" if device.type == "cpu" else "sdpa"
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except ValueError as error:
        raise ModelError(f"transformers cannot build model.config: {error}") from error
    return model.float()


def _config(spec: RunSpec) -> PreTrainedConfig:
    if spec.model.preset is not None:
        shape = PRESETS[spec.model.preset]
        return LlamaConfig(
            **shape, max_position_embeddings=spec.data.sequence_length, bos_token_id=None, eos_token_id=None
        )
    given = dict(spec.model.config or {})
    try:
        return AutoConfig.for_model(given.pop("model_type"), **given)
    except (ValueError, TypeError) as error:
        raise ModelError(f"transformers refuses model.config: {error}") from error


def _factory_model(spec: ModelSpec) -> nn.Module:
    assert spec.factory is not None
    module_name, _, function_name = spec.factory.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # last: nothing there may hide an installed package, one of ours above all
    try:
        module = importlib.import_module(module_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"model.factory = {spec.factory!r}: {error} (looked in the installed packages, then in {directory})"
        ) from error
    factory = getattr(module, function_name, None)
    if factory is None:
        raise ModelError(
            f"model.factory = {spec.factory!r}: {module!r} has no attribute {function_name!r}; installed packages come "
            f"before {directory}: if yours is there, give it another name"
        )
    model = factory()
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.factory = {spec.factory!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model
