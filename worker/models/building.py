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

from protocol.spec.model import EMBEDDING_STD, MAX_PARAMETERS, PRESETS, ModelSpec
from protocol.spec.run import RunSpec
from worker.errors import ModelError
from worker.models.adapters import import_peft, with_adapters
from worker.models.counting import check_size
from worker.models.pretrained import Pretrained, names_code
from worker.models.refusing import refusing
from worker.models.user_code import called

_SEEDING = threading.Lock()

log = logging.getLogger(__name__)


def build_model(spec: RunSpec, device: torch.device, max_parameters: int = MAX_PARAMETERS) -> nn.Module:
    """Return the run's model in float32 on `device`, with its initial parameters, unless `load_weights` brings them.
    Raises ModelError if it cannot be built, and before memory is taken for it if it has more than `max_parameters`; how
    many one has that a function returns is known only afterwards."""
    if not spec.model.is_given:
        raise ModelError(f"the run {spec.name} does not say what its model is: its workers are scripts that bring it")
    # The lock: torch's default generator belongs to the whole process.
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = _factory_model(spec.model) if spec.model.factory else _transformers_model(spec, device, max_parameters)
    return model.to(device)


def has_initial_parameters(model: nn.Module, spec: ModelSpec) -> bool:
    """Return True if `model`, which `build_model` made, has its initial parameters, and not only their shapes."""
    return spec.pretrained is None or spec.lora is not None or not _all_travels(model)


def load_weights(model: nn.Module, spec: ModelSpec) -> None:
    """Give `model`, which `build_model` made of `model.pretrained`, the weights from there. Raises ModelError."""
    trained = _pretrained(spec)
    weights = trained.model(trained.config(), _attention(torch.device("cpu"))).state_dict()
    try:
        if any(hasattr(each, "full_tensor") for each in model.parameters()):
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        else:
            model.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(
            f"model.pretrained = {spec.pretrained!r} is not what it was when this worker started; name a commit as "
            "model.revision, or leave the directory as it is"
        ) from error


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
            f"give model.config a vocab_size of {vocabulary} or more (a preset: model.vocab_size), or use another "
            "tokenizer"
        )
    if rows > vocabulary:
        unused = f"{rows - vocabulary:,}"
        log.info(
            "of the model's %d token ids the tokenizer has %d: %s rows are never trained", rows, vocabulary, unused
        )


def _transformers_model(spec: RunSpec, device: torch.device, max_parameters: int) -> nn.Module:
    if spec.model.pretrained is not None:
        return _pretrained_model(spec, device, max_parameters)
    config = _config(spec)
    if getattr(config, "vocab_size", None) is None:
        raise ModelError("model.config has no vocab_size: it is not the configuration of a causal language model")
    said = "model.config" if spec.model.preset is None else f"model.preset = {spec.model.preset!r}"
    check_size(config, said, max_parameters, _attention(device))
    config.use_cache = False
    with refusing(f"transformers cannot build {said}"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=_attention(device), trust_remote_code=False
        )
    embeddings = model.get_input_embeddings()
    if spec.model.preset in EMBEDDING_STD and isinstance(embeddings, nn.Embedding):
        nn.init.normal_(embeddings.weight, std=EMBEDDING_STD[spec.model.preset])
    return model.float()


def _pretrained_model(spec: RunSpec, device: torch.device, max_parameters: int) -> nn.Module:
    if spec.model.lora is not None:
        import_peft()  # before gigabytes are fetched in vain
    trained = _pretrained(spec.model)
    config, generation_config = trained.config(), trained.generation_config()
    attention, said = _attention(device), f"model.pretrained = {spec.model.pretrained!r}"
    check_size(config, said, max_parameters, attention)
    config.use_cache = False
    if spec.model.lora is not None:
        return with_adapters(trained.model(config, attention), spec.model, spec.seed)
    with refusing(f"transformers cannot build {said}"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
        )
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


def _config(spec: RunSpec) -> PreTrainedConfig:
    if spec.model.preset is not None:
        shape = PRESETS[spec.model.preset]
        vocabulary = {"vocab_size": spec.model.vocab_size or shape["vocab_size"]}
        return LlamaConfig(
            **shape | vocabulary,
            max_position_embeddings=spec.data.sequence_length,
            bos_token_id=None,
            eos_token_id=None,
        )
    given = dict(spec.model.config or {})
    if names_code(given):
        raise ModelError(
            "model.config names code (auto_map), which is never loaded: leave it out, or name a model.factory"
        )
    with refusing("transformers refuses model.config"):
        return AutoConfig.for_model(given.pop("model_type"), **given)


def _factory_model(spec: ModelSpec) -> nn.Module:
    assert spec.factory is not None
    model = called("model.factory", spec.factory)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.factory = {spec.factory!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model
