"""The whole run spec, and how it is read."""

import tomllib
from datetime import date
from typing import Any

from pydantic import Field, ValidationError, model_validator

from protocol.codecs import CODECS
from protocol.errors import SpecError
from protocol.fragments import MAX_FRAGMENTS
from protocol.spec.model import ModelSpec, inner_defaults, least_parameters, length_fault
from protocol.spec.sections import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    GuardSpec,
    InnerSpec,
    MembersSpec,
    Name,
    OuterSpec,
    PinSpec,
    RetentionSpec,
    Section,
    SyncSpec,
)
from protocol.validation_errors import explain, explain_all, similar_key

MAX_SPEC_BYTES = 1 << 16
MAX_UNIT_TOKENS = 1 << 28

# With private data, worker k of a run (counted from 0 in the order of first joins) has the units [k, k + 1) times this.
UNITS_PER_WORKER = 1 << 40
PRIVATE_WORKERS = 1 << 23  # with more of them, unit numbers would exceed 2^63 and could not be stored or sent


class RunSpec(Section):
    """A run spec. All keys have defaults except `sync.rounds` and the model."""

    name: Name = Field(..., description="the run's name: lower-case letters, digits, '.', '_' and '-'")
    seed: int = Field(0, ge=0, lt=1 << 32, description="seed of the initial model and of the order of the data")
    model: ModelSpec = Field(default_factory=ModelSpec)
    data: DataSpec = Field(default_factory=DataSpec)
    inner: InnerSpec = Field(default_factory=InnerSpec)
    outer: OuterSpec = Field(default_factory=OuterSpec)
    sync: SyncSpec
    members: MembersSpec = Field(default_factory=MembersSpec)
    checkpoints: CheckpointSpec = Field(default_factory=CheckpointSpec)
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    guard: GuardSpec = Field(default_factory=GuardSpec)
    retention: RetentionSpec = Field(default_factory=RetentionSpec)
    pins: PinSpec = Field(default_factory=PinSpec)

    @model_validator(mode="before")
    @classmethod
    def _inner_defaults(cls, document: Any) -> Any:
        """Add the defaults of [inner] that depend on the model."""
        if not isinstance(document, dict):
            return document
        model, inner = document.get("model"), document.get("inner", {})
        if not isinstance(model, dict) or not isinstance(inner, dict):
            return document
        return {**document, "inner": {**inner_defaults(model), **inner}}

    @model_validator(mode="after")
    def _model_is_given(self) -> "RunSpec":
        if not self.model.is_given and (self.data.source != "custom" or self.model.run is not None):
            raise ValueError(
                "model: give exactly one of preset, config, factory and pretrained; only scripts that bring their own "
                'model, with data.source = "custom" and without model.run, leave out all four'
            )
        return self

    @model_validator(mode="after")
    def _starts_from_another_run(self) -> "RunSpec":
        if self.model.run == self.name:
            raise ValueError(f"model.run = {self.name!r} is this run itself; name the run to start from")
        return self

    @model_validator(mode="after")
    def _one_momentum(self) -> "RunSpec":
        codec = CODECS[self.sync.upload_codec]
        if codec.add_weight is not None and self.outer.momentum != 0:
            raise ValueError(
                f'sync.upload_codec = "{codec.name}" needs outer.momentum = 0, not {self.outer.momentum}: what a '
                "worker has not sent yet acts as momentum, and a second momentum makes the training unstable"
            )
        return self

    @model_validator(mode="after")
    def _pins_only_shared_data(self) -> "RunSpec":
        if self.data.private and self.pins.data is not None:
            raise ValueError("pins.data: with data.private each worker has its own training set; leave it out")
        return self

    @model_validator(mode="after")
    def _private_units_have_room(self) -> "RunSpec":
        units = self.sync.rounds * self.sync.inner_steps
        if self.data.private and units >= UNITS_PER_WORKER:
            raise ValueError(
                f"data.private = true has room for {UNITS_PER_WORKER - 1} units per worker; sync.rounds × inner steps "
                f"is {units}; reduce either"
            )
        return self

    @model_validator(mode="after")
    def _a_batch_fits_into_memory(self) -> "RunSpec":
        if self.unit_tokens > MAX_UNIT_TOKENS:
            raise ValueError(
                f"inner.batch_size = {self.inner.batch_size:,} sequences of data.sequence_length = "
                f"{self.data.sequence_length:,} are {self.unit_tokens:,} tokens per inner step; at most "
                f"{MAX_UNIT_TOKENS:,} are allowed"
            )
        return self

    @model_validator(mode="after")
    def _a_sequence_fits_into_the_model(self) -> "RunSpec":
        if (fault := self.length_fault(self.model.config or {})) is not None:
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _the_model_fits_into_fragments(self) -> "RunSpec":
        least, most = least_parameters(self.model.config or {}), MAX_FRAGMENTS * self.sync.fragment_elements
        if least > most:
            raise ValueError(
                f"model.config has at least {least:,} parameters, but {MAX_FRAGMENTS:,} fragments of "
                f"sync.fragment_elements = {self.sync.fragment_elements:,} hold at most {most:,}: reduce the layers or "
                "the width"
            )
        return self

    def with_source(self, source: str | None) -> "RunSpec":
        """Return the spec with another `data.source`, for a machine that has the data elsewhere; None: unchanged."""
        if source is None:
            return self
        return self.model_copy(update={"data": self.data.model_copy(update={"source": source})})

    def dated(self, today: date) -> "RunSpec":
        """Return the spec with `data.date`, if its data are conversations and it gives none."""
        if self.data.format == "text" or self.data.date is not None:
            return self
        return self.model_copy(update={"data": self.data.model_copy(update={"date": today})})

    def length_fault(self, config: dict[str, Any]) -> str | None:
        """Return why a model with this configuration of transformers cannot train on the run's sequences; None if it
        can, or if scripts bring their own data."""
        return None if self.data.source == "custom" else length_fault(config, self.data.sequence_length)

    def number_in_set(self, unit: int) -> int:
        """Return the number of a work unit within its training set, which is the worker's own if data is private."""
        return unit % UNITS_PER_WORKER if self.data.private else unit

    @property
    def unit_tokens(self) -> int:
        """Tokens in one work unit."""
        return self.inner.batch_size * self.data.sequence_length

    @property
    def total_inner_steps(self) -> int:
        """Inner steps of the whole run, as the schedules count them.

        A worker that has done k of its h inner steps of round r is at step (r + k / h) · `sync.inner_steps`.
        """
        return self.sync.rounds * self.sync.inner_steps


def _explain(error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    similar = similar_key(key, RunSpec) if error["type"] == "extra_forbidden" else None
    return explain(error) + ("" if similar is None else f"; did you mean {similar}?")


def checked_spec(document: object) -> RunSpec:
    """Return the run spec in a document. Raises SpecError naming each wrong key, its value and what is allowed."""
    try:
        return RunSpec.model_validate(document)
    except ValidationError as error:
        raise SpecError(explain_all(error.errors(), one=_explain)) from error


def parse_spec(text: str) -> RunSpec:
    """Return the run spec in `text` (TOML). Raises SpecError naming each wrong key, its value and what is allowed."""
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise SpecError(f"the spec is larger than {MAX_SPEC_BYTES} bytes")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"the spec is not valid TOML: {error}") from error
    spec = checked_spec(document)
    unused = spec.inner.without_effect(set(document.get("inner", {})), by_scripts=spec.data.source == "custom")
    unused += spec.data.without_effect(set(document.get("data", {})))
    if unused:
        raise SpecError("; ".join(unused))
    return spec
