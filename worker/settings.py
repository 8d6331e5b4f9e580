"""The settings of `outerstep worker`: what belongs to the box and not to the run.

Each is declared once. The command line makes its options from these fields (outerstep/cli/options.py), the environment
has a variable for each, OUTERSTEP_STATE_DIR for `state_dir`, and docs/settings.md lists them.
"""

import platform
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from outerstep.common.connections import ssl_context
from outerstep.common.environment import EnvironmentSettings
from outerstep.common.quantities import parse_count, parse_rate
from protocol.messages import HostDetail
from protocol.spec.model import MAX_PARAMETERS, Base
from protocol.spec.sections import NAME_PATTERN, Name
from protocol.validation_errors import explain, explain_all

PREFIX = "OUTERSTEP_"


def _rate(given: object) -> object:
    return parse_rate(given) if isinstance(given, str) else given


def _count(given: object) -> object:
    return parse_count(given) if isinstance(given, str) else given


def _several(given: object) -> object:
    return [each.strip() for each in given.split(",")] if isinstance(given, str) else given


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0, allow_inf_nan=False)]


def default_name() -> str:
    """Return the host's name as a worker's name."""
    name = re.sub(r"[^a-z0-9._-]+", "-", platform.node().lower()).strip("._-")[:63]
    return name if re.match(NAME_PATTERN, name) else "worker"


class _Settings(EnvironmentSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    @classmethod
    def names(cls) -> Collection[str]:
        return WorkerSettings.model_fields


class BoxSettings(_Settings):
    """How one box trains. None of it changes the run: the outer state is fp32, and the batch is the run's."""

    device: str = Field(
        "auto", description="device to train on: auto (the fastest available), cpu, cuda, cuda:1, mps …"
    )
    gpus: int | None = Field(
        None, ge=1, description="number of this machine's GPUs to use as one worker, by torchrun; default: 1"
    )
    parallel: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description=(
            "how several GPUs share the model: ddp, a replica each; fsdp, a shard each; auto, replicas if a GPU has "
            "room for one"
        ),
    )
    data: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="where this machine has the training set; default: the run's data.source"
    )
    allow_code: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...], NoDecode, BeforeValidator(_several)
    ] = Field(
        (),
        description="code, as MODULE:NAME, that the run's spec may name and that then runs on this machine; repeatable",
    )
    data_root: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_several)] = Field(
        (),
        description=(
            "where the run's spec may read data, tokenizers and weights: a directory, the beginning of an address, or "
            "hub:NAME, a repository or an organisation of the Hugging Face hub; repeatable"
        ),
    )
    micro_batch: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description=(
            "sequences that go through the model at once; the gradient is that of the run's whole batch; auto: as "
            "many as fit, found by halving when memory runs out"
        ),
    )
    precision: Literal["float8", "bf16", "fp16", "tf32", "fp32"] | None = Field(
        None,
        description=(
            "arithmetic of the inner steps: autocast to bf16 or fp16 (with a GradScaler), fp32, or fp32 with TF32 "
            "matrix products (CUDA); float8: bf16, with the linear layers in float8 by torchao, which saves time only "
            "with --compile; default: bf16 on CUDA, else fp32"
        ),
    )
    param_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description=(
            "type of the parameters in memory; bf16 halves parameters and gradients, and rounds each step "
            "stochastically, so that small updates are not lost"
        ),
    )
    optimizer_state: Literal["fp32", "bf16", "8bit"] | None = Field(
        None,
        description=(
            "how the inner optimizer's moments are held: 8, 4 or 2 bytes per parameter for AdamW; default: the type "
            "of the parameters"
        ),
    )
    fit: Literal["auto"] | None = Field(
        None,
        description=(
            "with auto, the worker chooses param_dtype, optimizer_state, offload, lora_base and "
            "activation_checkpointing, as far as they are not given, so that the model fits into the free memory; the "
            "log says which"
        ),
    )
    offload: bool = Field(
        False,
        description=(
            "keep gradients and moments in host memory, and the outer state in a file, so that the GPU holds little "
            "more than the parameters; each inner step moves them over PCIe"
        ),
    )
    lora_base: Base | None = Field(
        None,
        description=(
            "how the frozen model of a run with adapters is held in memory: full, in fp32; nf4, in 4 bits, about an "
            "eighth of it (QLoRA); default: the run's model.lora.base"
        ),
    )
    compile: bool = Field(False, description="compile the model (torch.compile)")
    activation_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass instead of keeping them: slower, less memory"
    )
    max_parameters: Annotated[int, BeforeValidator(_count), Field(gt=0, lt=1 << 62)] = Field(
        MAX_PARAMETERS,
        description=(
            "largest model that the run's spec may describe, such as 70B: a larger one is not built; what "
            "model.factory returns is not counted"
        ),
    )
    data_cache: Path | None = Field(
        None,
        description=(
            "directory for shards of token sets behind a URL; workers may share it; default: ~/.cache/outerstep/shards"
        ),
    )
    data_cache_gb: float = Field(
        20.0,
        gt=0,
        allow_inf_nan=False,
        description="size limit in GB, for all workers that share this directory",
    )
    peak_flops: float | None = Field(
        None, gt=0, description="the device's peak in FLOP/s, for the MFU; default: from a table of GPUs"
    )
    step_log: Path | None = Field(
        None, description="file to which the loss of every inner step is appended, as JSON lines; default: none"
    )

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _auto_or_a_count(cls, value: object) -> object:
        if value == "auto" or (str(value).isdecimal() and int(str(value)) > 0):
            return value if value == "auto" else int(str(value))
        raise ValueError("give auto, or a number of sequences, at least 1")


class MemberSettings(_Settings):
    """How a worker, also a script's, takes part in a run."""

    url: str = Field(description="the coordinator's address, for example https://coordinator.example.org")
    run: Name = Field(description="the run to join")
    token: Annotated[str, Field(min_length=1, repr=False)] = Field(
        description=(
            "a join token, which the worker exchanges for its own worker token, or a worker token; an admin token "
            "works too, but can do everything else as well, so keep it off the boxes"
        )
    )
    ca: Path | None = Field(None, description="additional PEM certificates to trust, such as the coordinator's own")
    name: Name = Field(default_factory=default_name, description="this worker's name in the run; default: the host's")
    state_dir: Path | None = Field(
        None,
        description=(
            "directory of snapshot, worker token and, on a CPU, a large model's outer state; default: "
            "~/.local/state/outerstep/RUN/NAME"
        ),
    )
    report: HostDetail = Field(
        "all",
        description=(
            "what the coordinator learns about this machine, and shows to everyone who may read the run; less than all "
            "needs a name"
        ),
    )
    max_up: Rate | None = Field(
        None, description="limit for uploads in bits per second, such as 8mbit; for all processes together"
    )
    max_down: Rate | None = Field(None, description="the same for downloads: deltas, checkpoints")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address; it looks like https://coordinator.example.org")
        return url.rstrip("/")

    @field_validator("token", mode="before")
    @classmethod
    def _without_spaces(cls, token: object) -> object:
        return token.strip() if isinstance(token, str) else token

    @field_validator("ca")
    @classmethod
    def _has_certificates(cls, ca: Path | None) -> Path | None:
        if ca is not None:
            ssl_context(ca)
        return ca

    @model_validator(mode="after")
    def _named_by_choice(self) -> Self:
        if self.report != "all" and "name" not in self.model_fields_set:
            raise ValueError(
                f"report = {self.report!r} withholds this machine's name, which is the worker's default name: give a "
                "name as well"
            )
        return self

    def rates(self, processes: int) -> tuple[float | None, float | None]:
        """Return the rate limits of each of this many processes, up and down."""
        return self.max_up and self.max_up / processes, self.max_down and self.max_down / processes

    @property
    def directory(self) -> Path:
        """The directory of this worker's state."""
        return self.state_dir or Path.home() / ".local/state/outerstep" / self.run / self.name


class WorkerSettings(BoxSettings, MemberSettings):
    """The settings of one worker of one run."""


def script_settings(**given: Any) -> MemberSettings:
    """Return the settings of a script's worker: those that are given and not None, others from the environment. Raises
    ValueError for missing or wrong ones."""
    given = {key: value for key, value in given.items() if value is not None}

    def explained(error: Any) -> str:
        key = str(error["loc"][0]) if error["loc"] else ""
        if error["type"] == "missing":
            return f"{key} is missing: give {key}=…, or set {PREFIX}{key.upper()} in the environment"
        said = explain(error, echo=key != "token")
        return said if not key or key in given else f"{PREFIX}{key.upper()}{said.removeprefix(key)}"

    try:
        return MemberSettings(**given)
    except ValidationError as error:
        raise ValueError(explain_all(error.errors(), one=explained)) from error
