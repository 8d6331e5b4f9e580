"""The sections of a run spec except [model]: one class each, with its keys, their defaults and their checks."""

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.codecs import CodecName, DownloadCodecName
from protocol.errors import Problem
from protocol.fragments import Layout, TensorSpec, plan_fragments

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]

# The bounds are far above any real run, and far below what exhausts a machine or overflows a stored number.
InnerSteps = Annotated[int, Field(gt=0, le=1 << 20)]  # per round
Rounds = Annotated[int, Field(gt=0, le=100_000_000)]
Rate = Annotated[float, Field(gt=0, le=1000)]
Norm = Annotated[float, Field(gt=0, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]  # a year

Fraction = Annotated[float, Field(ge=0, lt=1)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

# Inner optimizer -> the keys of [inner] that it reads and others do not. worker/inner/optimizers.py has a function of
# each name.
OPTIMIZERS: dict[str, set[str]] = {
    "adamw": {"beta1", "beta2"},
    "muon": {"beta1", "beta2", "momentum", "muon_learning_rate"},
    "sgd": {"momentum"},
}

# Format of conversations -> the values of `train_on`, the default first.
TRAIN_ON: dict[str, tuple[Literal["assistant", "completion", "all"], ...]] = {
    "text": (),
    "chat": ("assistant", "all"),
    "completion": ("completion", "all"),
}
CONVERSATION_LENGTH = 1024  # the default of `sequence_length` for conversations

SCRIPT_KEYS = {"batch_size", "joiner_warmup_steps"}  # keys of [inner] that apply to workers that are scripts

MOST_ROUNDS = 4  # for as many rounds' time, a worker that never waits trains on by default


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class DataSpec(Section):
    """The training set: text or token ids, on the worker or at an address that it can fetch from."""

    source: str = Field(
        "python-stdlib",
        min_length=1,
        description=(
            "a directory or glob on the worker; the address of a token set by `outerstep data prepare` (https://, "
            'hf://, s3://, s3+https://, gs:// or az://); "hub:NAME[:CONFIG[:SPLIT]]"; "python-stdlib"; or "custom" for '
            "a script's own data. A directory or glob may contain text files, JSON lines (.jsonl, .jsonlines, .ndjson "
            "or .json; these and .txt also with .gz or .zst), .parquet, .bin (token ids of nanoGPT or llm.c), or a "
            "token set"
        ),
    )
    tokenizer: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description=(
            'turns text into token ids: "bytes", a directory with a tokenizer.json, or a repository of the Hugging '
            "Face hub; default: bytes, or the tokenizer of the token set"
        ),
    )
    format: Literal["text", "chat", "completion"] = Field(
        "text",
        description=(
            'what the data consists of. "chat": conversations, rows with "messages". "completion": rows with "prompt" '
            'and "completion", two texts or two lists of messages. The formats are those of TRL. Conversations are '
            "rendered by the tokenizer's chat template"
        ),
    )
    column: Annotated[str, Field(min_length=1)] = Field(
        "text",
        description=(
            'with format = "text": the key in JSON lines, or the column of parquet files and hub data sets, that has '
            "the text"
        ),
    )
    dtype: Literal["uint16", "uint32"] | None = Field(
        None, description="the type of the ids in .bin files without a header; default: uint16, as nanoGPT writes them"
    )
    train_on: Literal["assistant", "completion", "all"] | None = Field(
        None,
        description=(
            'which tokens count in the loss: "assistant", the default for chat; "completion", the default for '
            'completion; or "all"'
        ),
    )
    packing: bool = Field(
        True,
        description=(
            "put several conversations into a sequence, as many as fit; none of them sees another. false: one per "
            "sequence, padded"
        ),
    )
    date: datetime.date | None = Field(
        None,
        strict=False,  # JSON has no dates
        description=(
            "with conversations: the date that a chat template shows as today's. Default: the day on which the run is "
            "created, UTC"
        ),
        json_schema_extra={"default": "the run's"},
    )
    on_error: Literal["skip", "stop"] = Field(
        "skip",
        description=(
            'what happens to a row that is no conversation, or that the chat template rejects. "skip": it is left out, '
            'counted and shown; if there are more of them than others, the set is rejected. "stop": the set is rejected'
        ),
    )
    sequence_length: int = Field(
        256,
        gt=0,
        le=1 << 24,
        description=(
            "tokens per sequence. Default: 256, or 1024 for chat and completion, where a longer conversation is "
            "truncated"
        ),
        json_schema_extra={"default": "by the format"},
    )
    holdout: Fraction = Field(
        0.05,
        description=(
            "share of the data kept out of training. Text files are chosen by hash of their name, other documents by "
            "hash of their text. Of .bin files, those called val are held out, or else the end. A token set has its "
            "own held-out data"
        ),
    )
    private: bool = Field(
        False,
        description=(
            "each worker has its own training set and reports only its length and tokenizer: sets are not compared, "
            "units are counted per worker, and each worker measures the loss on its own held-out data"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _length_by_format(cls, document: Any) -> Any:
        """Add the default of `sequence_length` for conversations."""
        if isinstance(document, dict) and document.get("format", "text") != "text":
            return {"sequence_length": CONVERSATION_LENGTH, **document}
        return document

    @model_validator(mode="after")
    def _fits_the_format(self) -> "DataSpec":
        allowed = TRAIN_ON[self.format]
        if self.train_on is not None and self.train_on not in allowed:
            known = " or ".join(f'"{each}"' for each in allowed)
            raise ValueError(
                f'train_on = "{self.train_on}" does not exist for format = "{self.format}": '
                + (f"use {known}" if allowed else "leave it out")
            )
        if self.format != "text" and self.source == "custom":
            raise ValueError(f'format = "{self.format}" does nothing with source = "custom": leave it out')
        if self.format != "text" and self.tokenizer == "bytes":
            raise ValueError(
                f'format = "{self.format}" needs a tokenizer with a token that ends an answer, not "bytes"'
            )
        return self

    @property
    def trains_on(self) -> Literal["assistant", "completion", "all"]:
        """Which tokens count in the loss."""
        return self.train_on or ("all" if self.format == "text" else TRAIN_ON[self.format][0])

    def without_effect(self, given: set[str]) -> list[str]:
        """Return a sentence for each of the `given` keys that has no effect."""
        unused = {"packing", "date", "on_error"} if self.format == "text" else {"column", "dtype"}
        return [
            f'data.{key} does nothing with format = "{self.format}": leave it out' for key in sorted(unused & given)
        ]


class InnerSpec(Section):
    """The inner optimizer and its learning rates, in global inner steps. With `data.source = "custom"` the scripts
    bring both, and only `batch_size` and `joiner_warmup_steps` may be given."""

    batch_size: int = Field(8, gt=0, le=1 << 20, description="sequences per inner step; one batch is one work unit")
    optimizer: str = Field(
        "adamw",
        pattern=rf"^({'|'.join(OPTIMIZERS)}|[\w.]+:\w+)$",
        description=(
            'the inner optimizer; "muon" is Muon for the hidden matrices and AdamW for everything else (MuLoCo); or '
            "your own module:function, called on the worker with the model and these settings, which returns one "
            "torch.optim.Optimizer or a list, each group with its peak learning rate. Default: muon for model.preset "
            "and model.config, otherwise adamw"
        ),
        json_schema_extra={"default": "by the model"},
    )
    learning_rate: Rate = Field(
        4e-4,
        description=(
            "peak learning rate. Default: 0.4 / hidden_size for model.preset and for a model.config that gives it, at "
            "least 0.0004 and at most 0.008; otherwise 0.0004"
        ),
        json_schema_extra={"default": "by the model"},
    )
    muon_learning_rate: Rate | None = Field(
        None,
        description=(
            "Muon's own peak learning rate. Default: learning_rate, since Muon's steps are scaled to the size of "
            "AdamW's"
        ),
    )
    beta1: Fraction = Field(0.9, description="AdamW's beta 1")
    beta2: Fraction = Field(0.95, description="AdamW's beta 2")
    momentum: Fraction = Field(0.9, description="momentum of SGD and Muon")
    weight_decay: float = Field(
        0.1, ge=0, le=1000, description="weight decay: decoupled for AdamW and Muon, L2 for SGD"
    )
    clip_norm: Norm | Literal["none"] = Field(
        1.0, description='gradients are clipped to this global L2 norm; "none": no clipping'
    )
    schedule: Literal["cosine", "wsd", "linear", "constant"] = Field(
        "cosine",
        description=(
            "the learning rate from the end of the warmup to the end of the run: half a cosine, linear, or constant; "
            '"wsd" (warmup, stable, decay) is constant, then linear at the end'
        ),
    )
    decay_fraction: float = Field(0.2, gt=0, le=1, description='with "wsd": share of all inner steps that decay')
    final_fraction: float = Field(0.1, ge=0, le=1, description="learning rate at the end, as a fraction of the peak")
    warmup_steps: int = Field(
        100,
        ge=0,
        le=1_000_000_000,
        description=(
            "W, inner steps of linear warmup. Step s, counted from 0, has (s + 1) / W of the peak, so the first step "
            "trains too. The schedules of transformers have s / W: the same rates, one step later"
        ),
    )
    joiner_warmup_steps: int = Field(
        10,
        ge=0,
        le=1_000_000,
        description=(
            "additional inner steps of linear warmup for a worker that joins later, because its optimizer starts cold. "
            "A script must multiply its learning rate by `diloco.warmup_scale`; it gets a warning if it does not"
        ),
    )

    def without_effect(self, given: set[str], *, by_scripts: bool) -> list[str]:
        """Return a sentence for each of the `given` keys that has no effect. With `by_scripts`, the workers are scripts
        that bring their own optimizer and schedule."""
        if by_scripts:
            return [
                f'inner.{key} = {getattr(self, key)} does nothing with data.source = "custom", where scripts bring '
                "their own optimizer and schedule: leave it out"
                for key in sorted(given - SCRIPT_KEYS)
            ]
        of_some = set().union(*OPTIMIZERS.values())
        unused = dict.fromkeys(of_some - OPTIMIZERS.get(self.optimizer, of_some), f'optimizer = "{self.optimizer}"')
        if self.schedule != "wsd":
            unused["decay_fraction"] = f'schedule = "{self.schedule}"'
        if self.schedule == "constant":
            unused["final_fraction"] = 'schedule = "constant"'
        return [
            f"inner.{key} = {getattr(self, key)} does nothing with {chosen}: leave it out"
            for key, chosen in sorted(unused.items())
            if key in given
        ]


class OuterSpec(Section):
    """The outer optimizer: Nesterov SGD on the averaged pseudo-gradient."""

    learning_rate: Rate = Field(1.0, description="outer learning rate")
    momentum: Fraction = Field(0.6, description="outer Nesterov momentum")


class SyncSpec(Section):
    """When and how the workers synchronise."""

    rounds: Rounds = Field(
        ...,
        description=(
            "outer steps until the run is finished. One more if the first round is short, because no worker's speed is "
            "known yet, and more if rounds ended early for all workers"
        ),
    )
    inner_steps: InnerSteps = Field(
        500,
        description=(
            "H, inner steps per round of the fastest worker. Each other one does as many as it manages in the same "
            'time; with wait = "always" it does H, too'
        ),
    )
    upload_codec: CodecName = Field(
        "int8", description='codec of contributions; "sparse" needs many rounds and outer.momentum = 0'
    )
    download_codec: DownloadCodecName = Field("int8", description="codec of deltas")
    zstd: bool = Field(
        True,
        description="compress payloads with zstd: deltas always, uploads if the worker's connection is slow enough",
    )
    aggregation: Literal["screened", "clipped", "mean"] = Field(
        "screened",
        description=(
            'how contributions are averaged into a delta. "mean": weighted by tokens. "clipped": like mean, but norms '
            'are limited to those of the others. "screened": like clipped, but contributions that oppose the others '
            "are left out"
        ),
    )
    fragment_elements: Annotated[int, Field(ge=256, le=1 << 28)] = Field(
        1 << 23, description="maximum elements per fragment"
    )
    fragment_layers: Literal["sequential", "strided"] = Field(
        "sequential", description='layers of a fragment: adjacent, or far apart ("strided", for offsets = "spread")'
    )
    offsets: Literal["together", "spread"] = Field(
        "together", description="when fragments are due: all at the end of the round, or one after the other within it"
    )
    overlap: Annotated[int, Field(ge=0, le=1 << 20)] | Literal["eager"] = Field(
        0,
        description=(
            "inner steps that run while a fragment is sent, averaged and fetched (Streaming DiLoCo's tau); "
            '"eager": a whole round of them'
        ),
    )
    wait: Literal["never", "always"] = Field(
        "never",
        description=(
            '"never": each worker does inner steps in proportion to its speed. Until the round\'s deltas are there it '
            "trains on, up to most_steps, and carries that into its next contribution, as part of its H. "
            '"always": as in the DiLoCo paper, all workers do H inner steps and then wait for the deltas. Reproducible '
            "results need it"
        ),
    )
    most_steps: InnerSteps | None = Field(
        None, description='with wait = "never": most inner steps per round, H included; default: 4 H'
    )
    alpha: Literal["carry"] | Annotated[float, Field(ge=0, le=1)] = Field(
        "carry",
        description=(
            'what a worker continues from. "carry": the new global parameters, plus what it has trained since it sent '
            "its contribution. A number: a mix of its local and the global parameters, with this weight of the local "
            "ones (Streaming DiLoCo's alpha). 0 drops what it has trained since, 1 ignores the global parameters. "
            "Either works with or without an overlap"
        ),
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "SyncSpec":
        if isinstance(self.overlap, int) and self.overlap >= self.inner_steps:
            raise ValueError(
                f"overlap = {self.overlap} is a whole round or more; give less than {self.inner_steps}, or "
                '"eager" for a whole round'
            )
        if self.overlap == "eager" and self.offsets == "spread":
            raise ValueError('overlap = "eager" needs offsets = "together": every fragment has a whole round anyway')
        if self.wait == "never" and (self.overlap or self.offsets == "spread" or self.alpha != "carry"):
            raise ValueError(
                'overlap, offsets = "spread" and alpha need wait = "always": without it, workers send all fragments '
                "after their inner steps, and carry what they train until the deltas are there"
            )
        if self.most_steps is not None and (self.wait == "always" or self.most_steps <= self.inner_steps):
            raise ValueError(
                f'most_steps is for wait = "never", and more than H ({self.inner_steps}): leave it out for 4 H'
            )
        return self

    @property
    def streams(self) -> bool:
        """True if fragments are sent during training or at different times of the round, or are mixed."""
        return self.overlap != 0 or self.offsets == "spread" or self.alpha != "carry" or self.wait == "never"

    def most_steps_of(self, inner_steps: int) -> int:
        """Return the most inner steps that a worker with H = `inner_steps` does in a round, which is the number of its
        units."""
        if self.wait == "always":
            return inner_steps
        if self.most_steps is None:
            return MOST_ROUNDS * inner_steps
        return -(-inner_steps * self.most_steps // self.inner_steps)

    @property
    def kept_rounds(self) -> int:
        """For how many rounds after that of their assignment the units of a worker whose lease has ended are kept for
        it: as long as it may train on without the coordinator, and two rounds in which to return."""
        return 0 if self.wait == "always" else -(-self.most_steps_of(self.inner_steps) // self.inner_steps) + 1

    def plan_layout(self, tensors: list[TensorSpec]) -> Layout:
        """Return the fragments of these trained tensors. Raises LayoutError as `plan_fragments` does."""
        strided, taper = self.fragment_layers == "strided", self.offsets == "together"
        return plan_fragments(tensors, self.fragment_elements, strided=strided, taper=taper)


class MembersSpec(Section):
    """How many workers a round waits for, and for how long."""

    min_workers: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1, description="live workers needed to open and close a round"
    )
    lease_s: float = Field(60.0, ge=1, le=86_400, description="a worker that is silent for longer counts as lost")
    grace_factor: float = Field(
        0.5, ge=0, le=100, description="stragglers get this share of the time that the quorum needed"
    )
    grace_min_s: Seconds = Field(5.0, description="shortest grace for stragglers")
    grace_max_s: Seconds = Field(600.0, description="longest grace for stragglers")
    round_max_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = Field(
        14_400.0,
        description="after this time a round closes even without a quorum, if min_workers have contributed",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "MembersSpec":
        if self.grace_min_s > self.grace_max_s:
            raise ValueError(f"grace_min_s = {self.grace_min_s} is larger than grace_max_s = {self.grace_max_s}")
        return self


class CheckpointSpec(Section):
    """Checkpoints of the outer state on the coordinator. The last state is always kept."""

    every_rounds: Rounds = Field(10, description="rounds between checkpoints")
    keep: int = Field(2, gt=0, le=100_000, description="checkpoints to keep; deltas are kept back to the oldest one")


class EvaluationSpec(Section):
    """Held-out loss of the global model, measured by three workers with different tokens, or by the only one. A worker
    whose contribution raises it is found and left out."""

    every_rounds: Rounds = Field(
        1, description="rounds between evaluations; the first and last state are always evaluated"
    )
    max_tokens: int = Field(65_536, gt=0, le=1 << 36, description="maximum held-out tokens per evaluation")


class GuardSpec(Section):
    """What happens when the model looks damaged: its held-out loss has risen in two evaluations in a row, or its values
    are out of bounds."""

    action: Literal["tell", "pause", "rollback"] = Field(
        "pause",
        description="tell: only record an event (but values out of bounds always pause the run). pause: the run waits"
        " for its operator. rollback: the run returns to the newest checkpoint before the damage, bans workers whose"
        " contributions since then stand out, and continues. If none stands out, or it happens again, the run pauses",
    )
    loss_rise: float = Field(
        0.5, gt=0, le=1e6, description="nats per token above the lowest held-out loss so far that count as damage"
    )


class RetentionSpec(Section):
    """History in the database. Which files are kept is set in `checkpoints`."""

    rounds: Rounds = Field(
        100, description="rounds that keep every contribution and report; older ones keep their sums and the loss"
    )
    events: int = Field(10_000, gt=0, le=100_000_000, description="events to keep; older ones are deleted")


class PinSpec(Section):
    """BLAKE3 digests of what the first workers would otherwise decide; a worker with different ones is rejected.
    `outerstep run pin SPEC.toml` writes this section on a machine that has the model and the data."""

    layout: _Digest | None = Field(None, description="of the trained tensors' names and shapes, in their fragments")
    frozen: _Digest | None = Field(None, description="of the parameters that are not trained")
    data: _Digest | None = Field(None, description="of the training set")
    state: _Digest | None = Field(
        None,
        description="of state 0. With the same versions of torch and transformers, equal seeds give equal models on"
        " most machines; pin the state if your machines do",
    )


def check_pin(key: str, pinned: str | None, found: str | None) -> None:
    """Raise Problem `pin-mismatch` if the spec pins a digest other than the one found."""
    if pinned is not None and pinned != found:
        raise Problem(
            "pin-mismatch",
            f"the spec pins pins.{key} = {pinned}, here it is {found or 'none'}: use the versions, files and settings "
            "that the spec was pinned with, or ask the run's owner to pin a new run",
        )
