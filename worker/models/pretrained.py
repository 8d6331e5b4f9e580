"""Trained models of transformers: `model.pretrained`, a directory on this machine or a Hugging Face repository.

Nothing in it is executed or unpickled. config.json selects one of transformers' own architectures, and the weights are
read from safetensors. Of a repository only the necessary files are fetched, all from one commit, into the hub's cache.
"""

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from worker.errors import ModelError

CONFIG, GENERATION, ADAPTERS = "config.json", "generation_config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = 1 << 20  # elements that are checked at a time
_NAMED = 3  # tensors that an error names
_LENGTH = 300  # longest quotation of another library's error; some list every model that exists
_TRANSFORMERS_ERRORS = (  # nearly anything
    ArithmeticError,  # no attention heads, for example
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Replace what transformers raises for a model that it cannot make by a ModelError that begins with `what`."""
    try:
        yield
    except _TRANSFORMERS_ERRORS as error:
        raise ModelError(f"{what} ({type(error).__name__}: {_shortened(error)})") from error


def _shortened(error: Exception) -> str:
    """Return the error's message in one line of limited length."""
    return textwrap.shorten(str(error), _LENGTH, placeholder=" …").rstrip(".")


class Pretrained:
    """The files of `model.pretrained`, and the model in them. Its methods raise ModelError for files that cannot be
    fetched or are wrong; the error names the file and the remedy."""

    def __init__(self, source: str, revision: str | None) -> None:
        self._label = f"model.pretrained = {source!r}"
        self._repository, self._revision = source, revision
        self._directory = Path(source).expanduser()
        self._local, self._pinned = self._directory.is_dir(), False
        if self._local and revision is not None:
            raise ModelError(
                f"{self._label} is a directory: model.revision = {revision!r} is for the hub only; remove it"
            )
        if not self._local and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
            raise ModelError(f"{self._label}: no such directory on this machine")

    # --- the model ------------------------------------------------------------------------------------------------

    def config(self) -> PreTrainedConfig:
        """Return the model's configuration. Pins a repository to the commit that it came from."""
        path = self._file(CONFIG)
        if path is None:
            raise ModelError(
                f"{self._label} has no {CONFIG}; if it contains only adapters, merge them into their model first"
            )
        if not self._local:
            self._directory, self._revision, self._pinned = path.parent, path.parent.name, True  # the commit
        elif (self._directory / ADAPTERS).exists():
            raise ModelError(f"{self._label} has adapters next to the model ({ADAPTERS}); merge them into it first")
        with model_errors(f"{path}: transformers rejects it"):
            config: PreTrainedConfig = AutoConfig.from_pretrained(self._directory, trust_remote_code=False)
        _without_code(config)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(f"{path} describes a quantised model, which cannot be trained; name the original model")
        return config

    def generation_config(self) -> GenerationConfig | None:
        """Return the generation settings; None if it has none. Call `config` first."""
        path = self._file(GENERATION)
        if path is None:
            return None
        with model_errors(f"{path}: transformers rejects it"):
            return GenerationConfig.from_pretrained(path.parent)

    def model(self, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
        """Return the model with its weights, in fp32 on the CPU. `config` is what `config()` returned."""
        for path in self._weights():
            for name in _names(path):
                _checked(path, name)
        with model_errors(f"transformers cannot load {self._label}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self._directory,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # reported by _check
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        model: PreTrainedModel = loaded[0]
        self._check(loaded[1])
        return model

    def model_in_4_bits(self, config: PreTrainedConfig, attention: str, device: torch.device) -> PreTrainedModel:
        """Return the model with its weights on `device`, those of its linear layers in 4 bits (four_bits.py)."""
        from worker.models.four_bits import empty_in_4_bits, fill, shapes  # bitsandbytes is an extra

        files = {name: path for path in self._weights() for name in _names(path)}
        with model_errors(f"transformers cannot build {self._label} in 4 bits"):
            model = empty_in_4_bits(config, attention)
        wanted, known = shapes(model), model.state_dict()
        self._check_named(files, wanted)
        self._check(
            {
                "missing_keys": [],
                "unexpected_keys": [name for name in files if name not in known],
                "mismatched_keys": [
                    (name, given, asked)
                    for name, asked in wanted.items()
                    if (given := _shape(files[name], name)) != asked
                ],
            }
        )
        largest_first = sorted(wanted, key=lambda name: -math.prod(wanted[name]))
        fill(model, ((name, _checked(files[name], name)) for name in largest_first), device)
        return model

    def tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Yield tensors of the weights as they are in their files, one at a time."""
        self.config()
        files, names = {name: path for path in self._weights() for name in _names(path)}, list(names)
        self._check_named(files, names)
        for name in names:
            yield _tensor(files[name], name)

    def _check_named(self, files: Mapping[str, Path], names: Iterable[str]) -> None:
        """Raise ModelError unless the files have a tensor of each of these names."""
        for name in names:
            if name not in files:
                raise ModelError(
                    f"{self._label} has no tensor {name}: either {CONFIG} describes another model, or transformers "
                    "renames or merges the weights of this architecture, which a model in 4 bits does not allow; with "
                    "base = full it is loaded if it can be"
                )

    def _check(self, report: dict[str, Any]) -> None:
        """Raise ModelError unless the weights contained exactly the tensors of the model."""
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
                    f"{self._label}: the weights {fault} {len(names)} tensors of the model that {CONFIG} describes: "
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
                f"{self._label} has neither {WEIGHTS} nor {INDEX}; other formats can hold code and are not read: "
                "save the model with save_pretrained"
            )
        else:
            for name in _parts(index):
                part = self._file(name)
                if part is None:
                    raise ModelError(f"{self._label}: {name}, listed in {INDEX}, is missing")
                yield part

    def _file(self, name: str) -> Path | None:
        """Return the path of a file, fetched from the hub if necessary; None if there is no such file."""
        if self._local:
            path = self._directory / name
            return path if path.is_file() else None
        try:
            if self._pinned:
                cached = try_to_load_from_cache(self._repository, name, revision=self._revision)
                if cached is not None and not isinstance(cached, str):
                    return None  # cached knowledge that the repository has no such file
            return Path(hf_hub_download(self._repository, name, revision=self._revision))
        except EntryNotFoundError as error:
            if not isinstance(error, LocalEntryNotFoundError):
                return None
            raise self._unreachable(name, error) from error
        except (OSError, HFValidationError) as error:
            raise self._unreachable(name, error) from error

    def _unreachable(self, name: str, error: Exception) -> ModelError:
        return ModelError(
            f"{self._label} is not a directory on this machine, and {name} cannot be fetched from the Hugging "
            f"Face hub: {_shortened(error)}; if the hub cannot be reached, name a directory with the model's files"
        )


def names_code(config: Any) -> bool:
    """Return True if a configuration, or a nested one, names code that transformers would load from a repository."""
    if not isinstance(config, dict):
        return isinstance(config, list) and any(map(names_code, config))
    return "auto_map" in config or any(map(names_code, config.values()))


def _without_code(config: PreTrainedConfig) -> None:
    """Remove code from a configuration and its nested ones: transformers would ask whether to run it."""
    vars(config).pop("auto_map", None)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            _without_code(part)


def _parts(index: Path) -> list[str]:
    """Return the names of the weights' files. Raises ModelError if the index is not valid."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("weight_map does not name files in the same directory")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weights: {error}") from error
    return names


def _names(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file. Raises ModelError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged: {error}; fetch it again") from error


def _tensor(path: Path, name: str) -> Tensor:
    """Return a tensor of a safetensors file. The file is mapped into memory for this one tensor: otherwise all that was
    read before would stay."""
    with safe_open(path, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
        return tensor


def _shape(path: Path, name: str) -> list[int]:
    with safe_open(path, framework="pt") as tensors:
        return list(tensors.get_slice(name).get_shape())


def _checked(path: Path, name: str) -> Tensor:
    """Return a tensor of a safetensors file. Raises ModelError if it is damaged or has a value that is not finite."""
    tensor = _tensor(path, name)
    if tensor.is_floating_point() and not all(part.isfinite().all() for part in tensor.view(-1).split(_PART)):
        raise ModelError(f"{path}: tensor {name} has values that are not finite; the weights are unusable")
    return tensor
