"""A trained model of transformers: `model.pretrained`, a directory on this machine or a repository of the Hugging Face
hub.

Nothing in it is executed or unpickled: config.json says what to build, of what transformers itself has, and
safetensors has the weights. Of the hub's files those that are needed are fetched, into its own cache, and all of one
commit.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from worker.errors import ModelError
from worker.models.refusing import in_short, refusing

CONFIG, GENERATION, ADAPTERS = "config.json", "generation_config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = 3  # tensors that a sentence names


class Pretrained:
    """The files of `model.pretrained`, and what they make. Its methods raise ModelError for what cannot be had or is
    wrong, in a sentence that names it and the remedy."""

    def __init__(self, source: str, revision: str | None) -> None:
        self._said = f"model.pretrained = {source!r}"
        self._repository, self._revision = source, revision
        self._directory = Path(source).expanduser()
        self._local, self._pinned = self._directory.is_dir(), False
        if self._local and revision is not None:
            raise ModelError(f"{self._said} is a directory: model.revision = {revision!r} is for the hub; leave it out")
        if not self._local and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
            raise ModelError(f"{self._said}: there is no such directory on this machine")

    # --- what it makes --------------------------------------------------------------------------------------------

    def config(self) -> PreTrainedConfig:
        """Return its configuration."""
        path = self._file(CONFIG)
        if path is None:
            raise ModelError(f"{self._said} has no {CONFIG}; adapters alone are no model: merge them into theirs first")
        if not self._local:
            self._directory, self._revision, self._pinned = path.parent, path.parent.name, True  # to this commit
        elif (self._directory / ADAPTERS).exists():
            raise ModelError(f"{self._said} has adapters beside the model ({ADAPTERS}); merge them into it first")
        with refusing(f"{path}: transformers refuses it"):
            config: PreTrainedConfig = AutoConfig.from_pretrained(self._directory, trust_remote_code=False)
        _without_code(config)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"{path} is of a quantised model, which cannot be trained; give the one that it was made of"
            )
        return config

    def generation_config(self) -> GenerationConfig | None:
        """Return how it generates; None if it does not say. To be called after `config`."""
        path = self._file(GENERATION)
        if path is None:
            return None
        with refusing(f"{path}: transformers refuses it"):
            return GenerationConfig.from_pretrained(path.parent)

    def model(self, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
        """Return the model of `config`, which `config()` gave, with its weights, in fp32 on the CPU."""
        for path in self._weights():
            _check_finite(path)
        with refusing(f"transformers cannot load {self._said}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self._directory,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # they are told below
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        model: PreTrainedModel = loaded[0]
        self._check(loaded[1])
        return model

    def _check(self, report: dict[str, Any]) -> None:
        """Raise ModelError unless the tensors of the weights were those of the model, all of them, and no others."""
        mismatched = {
            f"{name} {list(given)} instead of {list(asked)}" for name, given, asked in report["mismatched_keys"]
        }
        faults = {
            "lack": report["missing_keys"],
            "also have": report["unexpected_keys"],
            "have in another shape": mismatched,
        }
        for fault, names in faults.items():
            if names:
                shown = ", ".join(sorted(names)[:_NAMED]) + (", …" if len(names) > _NAMED else "")
                raise ModelError(
                    f"{self._said}: the weights {fault} {len(names)} tensors of the model that {CONFIG} describes: "
                    f"{shown}; give weights and {CONFIG} that belong together"
                )

    # --- its files ------------------------------------------------------------------------------------------------

    def _weights(self) -> Iterator[Path]:
        """Yield the files of the weights."""
        whole = self._file(WEIGHTS)
        index = None if whole else self._file(INDEX)
        if whole:
            yield whole
        elif index is None:
            raise ModelError(
                f"{self._said} has neither {WEIGHTS} nor {INDEX}; other formats can hold code and are not read: "
                "save the model with save_pretrained"
            )
        else:
            for name in _parts(index):
                part = self._file(name)
                if part is None:
                    raise ModelError(f"{self._said}: {name}, which {INDEX} names, is missing")
                yield part

    def _file(self, name: str) -> Path | None:
        """Return one of its files, fetched from the hub if need be; None if it has no such file."""
        if self._local:
            path = self._directory / name
            return path if path.is_file() else None
        try:
            if self._pinned:
                cached = try_to_load_from_cache(self._repository, name, revision=self._revision)
                if cached is not None and not isinstance(cached, str):
                    return None  # the hub has said so before
            return Path(hf_hub_download(self._repository, name, revision=self._revision))
        except EntryNotFoundError as error:
            if not isinstance(error, LocalEntryNotFoundError):
                return None
            raise self._unreachable(name, error) from error
        except (OSError, HFValidationError) as error:
            raise self._unreachable(name, error) from error

    def _unreachable(self, name: str, error: Exception) -> ModelError:
        return ModelError(
            f"{self._said} is no directory on this machine, and {name} cannot be had from the Hugging Face hub: "
            f"{in_short(error)}; give a directory with the model's files where the hub cannot be reached"
        )


def names_code(config: Any) -> bool:
    """Return True if a configuration, or one within it, names code that transformers would load from elsewhere."""
    if not isinstance(config, dict):
        return isinstance(config, list) and any(map(names_code, config))
    return "auto_map" in config or any(map(names_code, config.values()))


def _without_code(config: PreTrainedConfig) -> None:
    """Let no part of a configuration name code: of parts transformers asks on the terminal whether to run it."""
    vars(config).pop("auto_map", None)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            _without_code(part)


def _parts(index: Path) -> list[str]:
    """Return the names of the files that the weights are in. Raises ModelError for an index that is none."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("weight_map names no files beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of weights: {error}") from error
    return names


def _check_finite(path: Path) -> None:
    """Raise ModelError for a file of safetensors that is damaged, or with a value that is not finite."""
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dictionary
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise ModelError(f"{path}: tensor {name} has values that are not finite; these weights are spoilt")
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged: {error}; fetch it again") from error
