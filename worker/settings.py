"""The settings of `outerstep worker`: what belongs to the box and not to the run."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from outerstep.common.connections import CA_VARIABLE, ssl_context
from outerstep.common.quantities import parse_count, parse_rate
from protocol.messages import HostDetail
from protocol.spec.model import MAX_PARAMETERS, Base
from protocol.spec.sections import NAME_PATTERN, Name
from protocol.validation_errors import explain_all

URL_VARIABLE, TOKEN_VARIABLE = "OUTERSTEP_URL", "OUTERSTEP_TOKEN"


def _rate(given: object) -> object:
    return parse_rate(given) if isinstance(given, str) else given


def _count(given: object) -> object:
    return parse_count(given) if isinstance(given, str) else given


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0, allow_inf_nan=False)]


def default_name() -> str:
    """Return the host's name as a worker's name."""
    name = re.sub(r"[^a-z0-9._-]+", "-", platform.node().lower()).strip("._-")[:63]
    return name if re.match(NAME_PATTERN, name) else "worker"


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Membership(_Settings):
    url: str = Field(description="the coordinator's address, for example https://coordinator.example.org")
    run: Name = Field(description="the run to join")
    token: Annotated[str, Field(min_length=1, repr=False)] = Field(
        description=(
            "a join token, which the worker exchanges for its own worker token, or a worker token; an admin token "
            "works too, but can do everything else as well, so keep it off the boxes"
        )
    )
    ca: Path | None = Field(None, description="additional PEM certificates to trust, such as the coordinator's own")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address; it looks like https://coordinator.example.org")
        return url.rstrip("/")

    @field_validator("ca")
    @classmethod
    def _has_certificates(cls, ca: Path | None) -> Path | None:
        ssl_context(ca)
        return ca


class BoxSettings(_Settings):
    """How one box trains. None of it changes the run: the outer state is fp32, and the batch is the run's."""

    name: Name = Field(default_factory=default_name, description="this worker's name in the run; default: the host's")
    state_dir: Path | None = Field(
        None,
        description=(
            "directory of snapshot, member token and, on a CPU, a large model's outer state; default: "
            "~/.local/state/outerstep/RUN/NAME"
        ),
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps …; auto is the fastest available")
    data: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="where this machine has the training set; default: the run's data.source"
    )
    allow_factory: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = Field(
        (), description="code that the run's spec may name and that is run here; repeatable"
    )
    data_root: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description=(
            "where the run's spec may find data, tokenizers and weights: a directory, the beginning of an "
            "address, or hub:NAME, a repository or an organisation of the Hugging Face hub; repeatable"
        ),
    )
    max_parameters: Annotated[int, BeforeValidator(_count), Field(gt=0, lt=1 << 62)] = Field(
        MAX_PARAMETERS,
        description=(
            "largest model that the run's spec may describe, such as 70B: a larger one is not built; what "
            "model.factory returns is not counted"
        ),
    )
    tell: HostDetail = Field(
        "all", description="what the coordinator learns about this machine, and shows to everyone who may read the run"
    )
    data_cache: Path | None = Field(
        None, description="directory for shards of token sets behind a URL; default: ~/.cache/outerstep/shards"
    )
    data_cache_gb: float = Field(
        20.0,
        gt=0,
        allow_inf_nan=False,
        description="size limit in GB, for all workers that share this directory",
    )
    mode: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description=(
            "how the processes started by torchrun or --gpus share the model: ddp, a replica each; fsdp, a shard "
            "each; auto: replicas if a GPU has room for one"
        ),
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; default: torch's own choice")
    micro_batch: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description=(
            "sequences that go through the model at once; the gradient is that of the run's whole batch. auto: as "
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
    parameters: Literal["fp32", "bf16"] = Field(
        "fp32",
        description=(
            "dtype of the model in memory; bf16 halves parameters and gradients, and rounds each step stochastically, "
            "so that small updates are not lost"
        ),
    )
    optimizer_state: Literal["fp32", "bf16", "8bit"] | None = Field(
        None,
        description=(
            "how the inner optimizer's moments are held: 8, 4 or 2 bytes per parameter for AdamW; default: the dtype "
            "of the parameters"
        ),
    )
    fit: Literal["auto"] | None = Field(
        None,
        description=(
            "auto: choose parameters, optimizer_state, offload, base and activation_checkpointing, as far as they are "
            "not given, so that the model fits into the free memory; the log says which"
        ),
    )
    offload: bool = Field(
        False,
        description=(
            "keep gradients and moments in host memory, and the outer state in a file, so that the GPU holds little "
            "more than the parameters; each inner step moves them over PCIe"
        ),
    )
    base: Base | None = Field(
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
    peak_flops: float | None = Field(
        None, gt=0, description="the device's peak in FLOP/s, for the MFU; default: from a table of GPUs"
    )
    max_up: Rate | None = Field(
        None, description="limit for uploads in bits per second, such as 8mbit; for all processes together"
    )
    max_down: Rate | None = Field(None, description="the same for downloads: deltas, checkpoints")
    log: Path | None = Field(
        None, description="file to which the loss of every inner step is appended, as JSON lines; default: none"
    )

    log_file: Path | None = Field(None, description="file to which the log is appended, in addition to stderr")

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _auto_or_a_count(cls, value: object) -> object:
        if value == "auto" or (str(value).isdecimal() and int(str(value)) > 0):
            return value if value == "auto" else int(str(value))
        raise ValueError("give auto, or a number of sequences, at least 1")

    @model_validator(mode="after")
    def _named_by_choice(self) -> "BoxSettings":
        if self.tell != "all" and "name" not in self.model_fields_set:
            raise ValueError(
                f"tell = {self.tell!r} withholds this machine's name, which is the worker's default name: give a "
                "name as well"
            )
        return self


class WorkerSettings(BoxSettings, _Membership):
    """The settings of one worker of one run."""

    def rates(self, processes: int) -> tuple[float | None, float | None]:
        """Return the rate limits of each of this many processes, up and down."""
        return self.max_up and self.max_up / processes, self.max_down and self.max_down / processes

    @property
    def directory(self) -> Path:
        """The directory of this worker's state."""
        return self.state_dir or Path.home() / ".local/state/outerstep" / self.run / self.name


def script_settings(
    run: str,
    url: str | None,
    token: str | None,
    name: str | None,
    environment: Mapping[str, str] | None = None,
    **line: Any,
) -> WorkerSettings:
    """Return the settings of a script's worker. URL and token come from the environment if not given, and `line` has
    rate limits. Raises ValueError for missing or wrong ones."""
    environment = os.environ if environment is None else environment
    given: dict[str, Any] = {"run": run, **line}
    if name is not None:
        given["name"] = name
    given["ca"] = environment.get(CA_VARIABLE) or None
    for key, value, variable in (("url", url, URL_VARIABLE), ("token", token, TOKEN_VARIABLE)):
        given[key] = environment.get(variable, "").strip() if value is None else value
        if not given[key]:
            raise ValueError(f"{key} is missing: give {key}=…, or set {variable} in the environment")
    try:
        return WorkerSettings(**given)
    except ValidationError as error:
        raise ValueError(explain_all(error.errors())) from error
