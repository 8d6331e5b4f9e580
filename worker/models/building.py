"""Build models: presets, any configuration of transformers, trained models, adapters, or the user's own function.

Every worker builds the same model from the run spec; its shapes must be the same everywhere. The seed gives all workers
the same initial parameters. A trained model's parameters are loaded only by the worker that seeds the run, when it is
asked to, unless the model has frozen parameters or buffers, which no exchange carries: then every worker loads them.
"""

import copy
import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from protocol.messages import MAX_TENSORS
from protocol.spec.model import EMBEDDING_STD, MAX_LAYERS, MAX_PARAMETERS, PRESETS, Base, LoraSpec, ModelSpec
from protocol.spec.run import RunSpec
from worker.errors import ModelError
from worker.memory import Sizes
from worker.models.pretrained import Pretrained, model_errors, names_code
from worker.models.user_code import call_user_function

if TYPE_CHECKING:
    from peft import PeftModel

BF16_BYTES, NF4_BYTES = 2, 0.53  # of a parameter; the last with its scales

_SEEDING = threading.RLock()  # a factory may build a model of ours and change it

log = logging.getLogger(__name__)

# At each import of bitsandbytes, also by peft, it warns that it could not fetch a kernel, which nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def build_model(
    spec: RunSpec,
    device: torch.device,
    max_parameters: int = MAX_PARAMETERS,
    base: Base = "full",
    trains_on: torch.device | None = None,
) -> nn.Module:
    """Return the run's model in float32 on `device`, with its initial parameters unless `load_weights` has to load
    them (see `has_initial_parameters`). `base`: how the frozen model of adapters is held. `trains_on`: the device that
    it will be moved to, for which the attention is chosen; None: `device`.

    Raises ModelError if it cannot be built, or has more than `max_parameters`. The size is checked before any memory is
    allocated, except that of a model from the user's function, which is known only afterwards.
    """
    if not spec.model.is_given:
        raise ModelError(f"the run {spec.name} does not define its model: its workers are scripts that bring their own")
    # The lock, because torch's default generator belongs to the whole process.
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = (
            _factory_model(spec)
            if spec.model.factory
            else _transformers_model(spec, trains_on or device, max_parameters, base)
        )
    return model.to(device)


def has_initial_parameters(model: nn.Module, spec: ModelSpec) -> bool:
    """Return True if `model`, from `build_model`, has its initial parameters; False if only their shapes are right."""
    return spec.pretrained is None or spec.lora is not None or not _is_all_trainable(model)


def load_weights(model: nn.Module, spec: ModelSpec) -> None:
    """Load the weights of `model.pretrained` into `model`, from `build_model`. Raises ModelError."""
    trained = _pretrained(spec)
    config = trained.config()
    weights = trained.model(config, _attention(torch.device("cpu"), config)).state_dict()
    try:
        if any(hasattr(each, "full_tensor") for each in model.parameters()):
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        else:
            model.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(
            f"model.pretrained = {spec.pretrained!r} has changed since this worker started; set model.revision to a "
            "commit, or leave the directory unchanged"
        ) from error


def logits_of(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return the model's logits, [batch, length, vocabulary], for token ids int64[batch, length].

    positions  of the tokens in their conversations, int64 of the same shape: models of transformers then let no token
               see another conversation. None: each sequence is a whole
    """
    output = model(tokens) if positions is None else model(tokens, position_ids=positions)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def check_vocabulary(model: nn.Module, vocabulary: int) -> None:
    """Raise ModelError if the model's vocabulary is smaller than `vocabulary`; log unused ids if it is larger.

    A model from the user's function is checked only if it has a `config.vocab_size` like those of transformers.
    """
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(rows, int):
        return
    if rows < vocabulary:
        raise ModelError(
            f"the model's vocab_size = {rows} is too small: the training set has token ids up to {vocabulary - 1}; "
            f"set vocab_size to {vocabulary} or more in model.config (model.vocab_size for a preset), or use another "
            "tokenizer"
        )
    if rows > vocabulary:
        unused = f"{rows - vocabulary:,}"
        log.info(
            "the tokenizer uses %d of the model's %d token ids; %s rows are never trained", vocabulary, rows, unused
        )


# --- models of transformers ---------------------------------------------------------------------------------------


def _transformers_model(spec: RunSpec, device: torch.device, max_parameters: int, base: Base) -> nn.Module:
    if spec.model.pretrained is not None:
        return _pretrained_model(spec, device, max_parameters, base)
    config = _config(spec)
    _check_length(config, spec)
    if getattr(config, "vocab_size", None) is None:
        raise ModelError("model.config has no vocab_size: it is not the configuration of a causal language model")
    label = "model.config" if spec.model.preset is None else f"model.preset = {spec.model.preset!r}"
    attention = _attention(device, config)
    _check_size(config, label, max_parameters, attention)
    config.use_cache = False
    with model_errors(f"transformers cannot build {label}"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, trust_remote_code=False
        )
    embeddings = model.get_input_embeddings()
    if spec.model.preset in EMBEDDING_STD and isinstance(embeddings, nn.Embedding):
        nn.init.normal_(embeddings.weight, std=EMBEDDING_STD[spec.model.preset])
    return model.float()


def _pretrained_model(spec: RunSpec, device: torch.device, max_parameters: int, base: Base) -> nn.Module:
    if spec.model.lora is not None:  # fail before gigabytes are fetched
        _import_for("model.lora", "peft", "peft")
        if base == "nf4":
            _import_for("a frozen model in 4 bits (nf4)", "bitsandbytes", "qlora")
    trained = _pretrained(spec.model)
    config, generation_config = trained.config(), trained.generation_config()
    _check_length(config, spec)
    attention, label = _attention(device, config), f"model.pretrained = {spec.model.pretrained!r}"
    _check_size(config, label, max_parameters, attention)
    config.use_cache = False
    if spec.model.lora is not None:
        in_4_bits = base == "nf4"
        frozen = trained.model_in_4_bits(config, attention, device) if in_4_bits else trained.model(config, attention)
        return _with_adapters(frozen, spec.model, spec.seed)
    with model_errors(f"transformers cannot build {label}"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
        )
    if not _is_all_trainable(model):
        model = trained.model(config, attention)
    if generation_config is not None:
        model.generation_config = generation_config
    return model


def _check_length(config: Any, spec: RunSpec) -> None:
    """Raise ModelError if the run's sequences are longer than the model allows."""
    if isinstance(config, PreTrainedConfig) and (fault := spec.length_fault(config.to_dict())) is not None:
        raise ModelError(fault)


def _pretrained(spec: ModelSpec) -> Pretrained:
    assert spec.pretrained is not None
    return Pretrained(spec.pretrained, spec.revision)


def _is_all_trainable(model: nn.Module) -> bool:
    """Return True if a checkpoint of the model consists of trainable parameters only."""
    kept = model.state_dict().keys()
    return all(each.requires_grad for each in model.parameters()) and kept.isdisjoint(dict(model.named_buffers()))


def _attention(device: torch.device, config: PreTrainedConfig) -> str:
    """Return the implementation of attention: torch's scaled_dot_product_attention, except for models without it, and
    on CPUs, where a step with it takes twice as long as with plain matrix products."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    with_sdpa = getattr(kind, "_supports_sdpa", True)
    return "sdpa" if with_sdpa and device.type != "cpu" else "eager"


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
        raise ModelError("model.config names code (auto_map), which is never loaded: remove it, or use model.factory")
    with model_errors("transformers rejects model.config"):
        return AutoConfig.for_model(given.pop("model_type"), **given)


# --- adapters -----------------------------------------------------------------------------------------------------


def _with_adapters(model: PreTrainedModel, spec: ModelSpec, seed: int) -> "PeftModel":
    """Return `model`, frozen, with the low-rank adapters of `model.lora` (LoRA, arXiv 2106.09685).

    The adapters are drawn from torch's default generator with `seed`, and do not change the model's outputs at first.
    Raises ModelError if peft is not installed or rejects them.
    """
    peft, lora = _import_for("model.lora", "peft", "peft"), spec.lora
    assert lora is not None
    config = _adapter_config(peft, lora)
    model.name_or_path = spec.pretrained  # saved with the adapters as the name of their base model
    torch.manual_seed(seed)
    try:
        adapted: PeftModel = peft.get_peft_model(model, config, revision=spec.revision)
    except ValueError as error:
        raise ModelError(f"model.lora: peft rejects it: {error}") from error
    return adapted


def _adapter_config(peft: Any, lora: LoraSpec) -> Any:
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _import_for(what: str, package: str, extra: str) -> Any:
    """Return the package. Raises ModelError if it, or one that it needs, is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{what} needs {error.name}, which is not installed; run: pip install 'outerstep[{extra}]'"
        ) from error


# --- the user's own function --------------------------------------------------------------------------------------


def _factory_model(spec: RunSpec) -> nn.Module:
    factory = spec.model.factory
    assert factory is not None
    model = call_user_function("model.factory", factory)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.factory = {factory!r} returned {type(model).__name__}, not a torch.nn.Module")
    _check_length(getattr(model, "config", None), spec)
    return model


# --- the size of a model, without allocating it -------------------------------------------------------------------


class _TooManyTensors(Exception):
    """The model has more tensors than a run can have."""


def sizes_of(spec: RunSpec, max_parameters: int = MAX_PARAMETERS) -> Sizes:
    """Return the sizes of the run's model, which is of transformers, without allocating it. Of `model.pretrained`, the
    configuration is fetched if necessary. Raises ModelError."""
    model_spec = spec.model
    if model_spec.pretrained is not None:
        config, label = _pretrained(model_spec).config(), f"model.pretrained = {model_spec.pretrained!r}"
    else:
        config, label = _config(spec), "the run's model"
    _check_length(config, spec)
    with _SEEDING:  # transformers sets torch's default dtype meanwhile, which belongs to the whole process
        model = _check_size(config, label, max_parameters, _attention(torch.device("cpu"), config))
    whole = sum(each.numel() for each in model.parameters())
    if model_spec.lora is None:
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        return Sizes(trained, whole - trained)
    in_4_bits = bytes_in_4_bits(model)
    with _SEEDING, torch.random.fork_rng(devices=[]), torch.device("meta"):
        adapted = _with_adapters(model, model_spec, spec.seed)
    return Sizes(sum(each.numel() for each in adapted.parameters() if each.requires_grad), whole, in_4_bits)


def bytes_in_4_bits(model: PreTrainedModel) -> int:
    """Return the bytes of the model with its linear layers in NF4 and the rest, with the head, in bf16."""
    head, whole = model.get_output_embeddings(), sum(each.numel() for each in model.parameters())
    linear = sum(each.weight.numel() for each in model.modules() if type(each) is nn.Linear and each is not head)
    return round(NF4_BYTES * linear) + BF16_BYTES * (whole - linear)


def _check_size(config: PreTrainedConfig, label: str, most: int, attention: str) -> PreTrainedModel:
    """Return the model of `config` on torch's meta device, where it has no memory. `label` names it in errors.

    Raises ModelError if it has more than `most` elements in its parameters and buffers, more than MAX_LAYERS layers, or
    more than MAX_TENSORS tensors.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ModelError(f"{label} has {layers:,} layers; at most {MAX_LAYERS:,} are allowed")
    try:
        with (
            model_errors(f"transformers cannot build {label}"),
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            _at_most(MAX_TENSORS),
        ):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention, trust_remote_code=False
            )
    except _TooManyTensors:
        raise ModelError(f"{label} has more than {MAX_TENSORS:,} tensors; a run can have no more") from None
    parameters, buffers = (sum(each.numel() for each in some) for some in (model.parameters(), model.buffers()))
    if parameters + buffers > most:
        also = f" and buffers of {buffers:,} elements" if buffers > parameters else ""
        raise ModelError(
            f"{label} has {parameters:,} parameters{also}, {4 * (parameters + buffers) / 1e9:,.1f} GB in fp32; the "
            f"owner of this machine allows {most:,}. If you trust the author of the spec and have enough memory, set "
            f"OUTERSTEP_MAX_PARAMETERS={parameters + buffers}"
        )
    return model


@contextmanager
def _at_most(tensors: int) -> Iterator[None]:
    """Raise _TooManyTensors as soon as this thread's modules have more, as a model with a million takes long to
    build."""
    thread, found = threading.get_ident(), 0

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> Any:
        nonlocal found
        if tensor is not None and threading.get_ident() == thread:
            found += 1
            if found > tensors:
                raise _TooManyTensors

    hooks = (
        registration.register_module_parameter_registration_hook(count),
        registration.register_module_buffer_registration_hook(count),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
