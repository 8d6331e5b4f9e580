"""The section [model]: what is trained; the models that ship with Outerstep; and bounds on a model's size.

A spec is text from somebody else. `sections.py` bounds each of its numbers, but a model's size is a product of several.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from protocol.spec.sections import Fraction, Name, Section

BYTES = 256  # token ids of text

# Configurations of transformers' Llama. tiny: 139,584 parameters. The others have the shapes of OpenDiLoCo (arXiv
# 2407.07852, table 1).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": BYTES,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.08,  # what transformers' default, 0.02, is for a width of 1024
    },
    "llama-150m": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 2688,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-5,
    },
    "llama-1b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
    },
}

# Preset -> standard deviation of its embeddings' initial values, if it differs from that of the other matrices. So
# narrow a model needs large learning rates, which throw small embeddings about. With 1.0, torch's default, they move by
# less than a hundredth per step, as those of large models do. docs/log.md has the measurements.
EMBEDDING_STD = {"tiny": 1.0}

MIN_LEARNING_RATE, MAX_LEARNING_RATE = 4e-4, 8e-3
RATE_TIMES_WIDTH = 0.4  # learning rate × hidden_size, measured at a width of 64: docs/log.md

# The largest model that a worker builds, unless its owner allows more: OUTERSTEP_MAX_PARAMETERS.
MAX_PARAMETERS = 20_000_000_000
MAX_LAYERS = 4096

# The keys of transformers' configurations for the number of layers and for the width.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")

# And for the longest sequence.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")

_SOURCES = ("preset", "config", "factory", "pretrained")


# How a worker holds a frozen model in memory: in fp32, or quantised to 4 bits (NF4).
Base = Literal["full", "nf4"]


class LoraSpec(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685), by peft. The model stays unchanged: only the adapters are trained and
    sent. Needs `model.pretrained`, and `pip install 'outerstep[peft]'` on the workers."""

    rank: int = Field(16, gt=0, le=4096, description="r, the inner dimension of an adapter")
    alpha: float = Field(32.0, gt=0, le=1e6, description="an adapter's output is scaled by alpha / rank")
    dropout: Fraction = Field(0.0, description="dropout on the input of an adapter")
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear", description="the modules that get an adapter, by name suffix; all linear ones except the head"
    )
    base: Base = Field(
        "full",
        description=(
            "how workers hold the frozen model: full, in fp32; nf4, in 4 bits (QLoRA, arXiv 2305.14314), which needs "
            "`pip install 'outerstep[qlora]'`. A worker's --lora-base overrides it: both can share a run"
        ),
    )


class ModelSpec(Section):
    """What is trained. Give exactly one of preset, config, factory and pretrained; or none if the workers are scripts
    that bring their own model (`data.source = "custom"`)."""

    preset: Literal["tiny", "llama-150m", "llama-1b"] | None = Field(
        None, description="a model that ships with Outerstep"
    )
    vocab_size: Annotated[int, Field(gt=0, le=1 << 24)] | None = Field(
        None, description="with a preset: the vocabulary size, for example your tokenizer's; default: the preset's own"
    )
    config: dict[str, Any] | None = Field(
        None, description="a transformers configuration for AutoModelForCausalLM.from_config; needs its model_type"
    )
    factory: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = Field(
        None, description="your own module:function, called without arguments on the worker; returns a torch.nn.Module"
    )
    pretrained: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description=(
            "a directory on the workers, such as an export, or a repository of the Hugging Face hub, with config.json "
            "and safetensors; its weights are state 0"
        ),
    )
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="with a repository of the hub: its branch, tag or commit; default: the default branch"
    )
    run: Name | None = Field(
        None, description="another run on this coordinator, of the same shape: its parameters are state 0"
    )
    round: Annotated[int, Field(ge=0, lt=1 << 40)] | None = Field(
        None, description="with `run`: the checkpoint of that round; default: the latest"
    )
    lora: LoraSpec | None = Field(None, description="train adapters instead of the model")

    @model_validator(mode="after")
    def _at_most_one(self) -> "ModelSpec":
        given = [key for key in _SOURCES if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"give exactly one of preset, config, factory and pretrained, not {given}")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError('config needs a model_type, for example model_type = "llama"')
        _check_layers(self.config or {})
        for key, needed in (
            ("vocab_size", "preset"),
            ("revision", "pretrained"),
            ("round", "run"),
            ("lora", "pretrained"),
        ):
            if getattr(self, key) is not None and getattr(self, needed) is None:
                raise ValueError(f"{key} needs {needed}: give both, or leave {key} out")
        return self

    @property
    def is_given(self) -> bool:
        """True if the spec names a model; otherwise the workers' scripts bring it."""
        return any(getattr(self, key) is not None for key in _SOURCES)


def inner_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of [inner] that depend on this [model]: a model that is trained from scratch and whose
    matrices are known gets Muon and a learning rate for its width. docs/convergence.md shows the gain."""
    shape = PRESETS.get(str(model.get("preset"))) or model.get("config")
    if not isinstance(shape, dict):
        return {}
    width = shape.get("hidden_size")
    if not isinstance(width, int) or width < 1:
        return {"optimizer": "muon"}
    rate = min(max(RATE_TIMES_WIDTH / width, MIN_LEARNING_RATE), MAX_LEARNING_RATE)
    return {"optimizer": "muon", "learning_rate": rate}


def _check_layers(config: dict[str, Any]) -> None:
    """Raise ValueError if the configuration, or a nested one, has more layers than any model."""
    for key, value in config.items():
        if key in _LAYERS and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"config.{key} = {value:,}: at most {MAX_LAYERS:,} layers are allowed")
        if isinstance(value, dict):
            _check_layers(value)


def least_parameters(config: dict[str, Any]) -> int:
    """Return a lower bound of the parameters of a model with this configuration, from the layers and width that it
    gives: each layer has at least one square matrix, for its queries or its outputs."""
    layers, width = (
        max((config[key] for key in keys if isinstance(config.get(key), int)), default=0) for keys in (_LAYERS, _WIDTHS)
    )
    return max(layers, 1) * max(width, 0) ** 2


def length_fault(config: dict[str, Any], sequence_length: int) -> str | None:
    """Return why a model with this configuration of transformers cannot train on sequences of this length; None if it
    can, as far as the configuration says. Rotary positions beyond the last would be trained without an error."""
    config, key = _of_text(config), positions_key(config)
    if key is None or not 0 < (most := int(max(config[key], _scaled(config, config[key])))) < sequence_length:
        return None
    return (
        f"data.sequence_length = {sequence_length:,} is more than the {most:,} positions of the model ({key}): set "
        f"data.sequence_length to {most} or less, or, for a model with rotary positions, raise {key} in its "
        "configuration"
    )


def positions_key(config: dict[str, Any]) -> str | None:
    """Return the key of a configuration that gives the number of positions; None if none does."""
    config = _of_text(config)
    return next((key for key in _POSITIONS if isinstance(config.get(key), int)), None)


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that is the language model's."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def _scaled(config: dict[str, Any], positions: int) -> float:
    """Return the positions of a model whose rotary positions are scaled; 0 if they are not."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or not isinstance(factor := rope.get("factor"), int | float):
        return 0
    original = rope.get("original_max_position_embeddings")
    return factor * (original if isinstance(original, int) else positions)
