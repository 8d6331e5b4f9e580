"""Models: the presets, any configuration of transformers, a trained model, or the user's own function.

Every worker builds the same model from the run spec: its shape must be the same everywhere. The seed gives all workers
the same initial parameters; but those of a trained model are loaded by the worker that seeds the run alone, when it is
asked to, unless there is more to it than what travels.
"""

import logging
import threading

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from protocol.spec import ModelSpec, RunSpec
from worker.errors import ModelError
from worker.models.adapters import with_adapters
from worker.models.presets import PRESETS
from worker.models.pretrained import Pretrained
from worker.user_code import imported

_SEEDING = threading.Lock()

log = logging.getLogger(__name__)


def build_model(spec: RunSpec, device: torch.device, *, vocabulary: int = 0) -> nn.Module:
    """Return the run's model in float32 on `device`, with its initial parameters, unless `load_weights` brings them.

    `vocabulary`: all token ids of the training set are below it. Raises ModelError if the model cannot be built, or has
    a smaller vocabulary.
    """
    # The lock: torch's default generator belongs to the whole process.
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = _factory_model(spec.model) if spec.model.factory else _transformers_model(spec, device, vocabulary)
    return model.to(device)


def has_initial_parameters(model: nn.Module, spec: ModelSpec) -> bool:
    """Return True if `model`, which `build_model` made, has its initial parameters, and not only their shapes."""
    return spec.pretrained is None or spec.lora is not None or not _all_travels(model)


def load_weights(model: nn.Module, spec: ModelSpec) -> None:
    """Give `model`, which `build_model` made of `model.pretrained`, the weights from there. Raises ModelError."""
    trained = _pretrained(spec)
    model.load_state_dict(trained.model(trained.config(), _attention(torch.device("cpu"))).state_dict())


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the model's logits, [batch, length, vocabulary], for token ids int64[batch, length]."""
    output = model(tokens)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def _transformers_model(spec: RunSpec, device: torch.device, vocabulary: int) -> nn.Module:
    if spec.model.pretrained is not None:
        return _pretrained_model(spec, device, vocabulary)
    config = _config(spec)
    _check_vocabulary(config, spec.model, vocabulary)
    config.use_cache = False
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=_attention(device))
    except ValueError as error:
        raise ModelError(f"transformers cannot build model.config: {error}") from error
    return model.float()


def _pretrained_model(spec: RunSpec, device: torch.device, vocabulary: int) -> nn.Module:
    trained = _pretrained(spec.model)
    config, generation_config = trained.config(), trained.generation_config()
    _check_vocabulary(config, spec.model, vocabulary)
    config.use_cache = False
    attention = _attention(device)
    if spec.model.lora is not None:
        return with_adapters(trained.model(config, attention), spec.model, spec.seed)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    except ValueError as error:
        raise ModelError(f"transformers cannot build model.pretrained = {spec.model.pretrained!r}: {error}") from error
    if not _all_travels(model):
        model = trained.model(config, attention)
    if generation_config is not None:
        model.generation_config = generation_config
    return model


def _pretrained(spec: ModelSpec) -> Pretrained:
    assert spec.pretrained is not None
    return Pretrained(spec.pretrained, spec.revision)


def _all_travels(model: nn.Module) -> bool:
    """Return True if the trainable parameters are all that a checkpoint of the model consists of."""
    kept = model.state_dict().keys()
    return all(each.requires_grad for each in model.parameters()) and kept.isdisjoint(dict(model.named_buffers()))


def _attention(device: torch.device) -> str:
    # On CPUs scaled_dot_product_attention costs twice the step time of plain matrix products.
    return "eager" if device.type == "cpu" else "sdpa"


def _check_vocabulary(config: PreTrainedConfig, spec: ModelSpec, needed: int) -> None:
    """Raise ModelError if the model has fewer than `needed` token ids; tell it where it has many more."""
    rows = getattr(config, "vocab_size", None)
    key = "model.config.vocab_size" if spec.config is not None else "the model's vocabulary"
    if rows is None or rows < needed:
        raise ModelError(
            f"{key} = {rows}, but the data's tokenizer has {needed} token ids; give another model or tokenizer"
        )
    if needed and rows > 2 * needed:
        remedy = f"; model.vocab_size = {needed} saves them" if spec.preset is not None else ""
        log.warning("%d of the %d rows of the embedding are of no token of the data%s", rows - needed, rows, remedy)


def _config(spec: RunSpec) -> PreTrainedConfig:
    if spec.model.preset is not None:
        shape = dict(PRESETS[spec.model.preset])
        if spec.model.vocab_size is not None:
            shape["vocab_size"] = spec.model.vocab_size
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
    factory = imported("model.factory", spec.factory)
    model = factory()
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.factory = {spec.factory!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model
