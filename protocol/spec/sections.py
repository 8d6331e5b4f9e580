"""The sections of a run spec: a class each, with its keys, their defaults and what they are checked for."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.codecs import CODECS, CodecName, DownloadCodecName
from protocol.spec.sizes import check_layers

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]

# Bounds are far beyond any run, and far below what breaks a machine, or makes a number that nobody can store.
Steps = Annotated[int, Field(gt=0, le=1 << 20)]  # inner steps per round
Rounds = Annotated[int, Field(gt=0, le=100_000_000)]
Rate = Annotated[float, Field(gt=0, le=1000)]
Norm = Annotated[float, Field(gt=0, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]  # a year

Fraction = Annotated[float, Field(ge=0, lt=1)]

# Inner optimizer -> those keys of [inner] that it takes and not all of them do. There is a function of each name in
# worker/inner/optimizers.py.
OPTIMIZERS: dict[str, set[str]] = {
    "adamw": {"beta1", "beta2"},
    "muon": {"beta1", "beta2", "momentum", "muon_learning_rate"},
    "sgd": {"momentum"},
}


# Keys of [inner] that matter to workers that are scripts.
READ_BY_SCRIPTS = {"batch_size", "joiner_warmup_steps"}

BY_VALUE = {"trimmed", "median"}  # rules of aggregation that need all values of each worker


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class LoraSpec(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685), by peft, on a model that stays as it is: only they are trained and
    sent. Needs `model.pretrained`, and `pip install 'outerstep[peft]'` on the workers."""

    rank: int = Field(16, gt=0, le=4096, description="r, the inner dimension of an adapter")
    alpha: float = Field(32.0, gt=0, le=1e6, description="what an adapter adds is scaled by alpha / rank")
    dropout: Fraction = Field(0.0, description="dropout on the input of an adapter")
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear", description="the modules that get one, by the ends of their names; all linear ones but the head"
    )


MODELS = ("preset", "config", "factory", "pretrained")


class ModelSpec(Section):
    """What is trained: exactly one of preset, config, factory and pretrained; or none of them, where the workers are
    scripts, which bring it (`data.source = "custom"`)."""

    preset: Literal["tiny", "llama-150m", "llama-1b"] | None = Field(
        None, description="a model that ships with Outerstep"
    )
    vocab_size: Annotated[int, Field(gt=0, le=1 << 24)] | None = Field(
        None, description="with a preset: its vocabulary, such as the tokenizer's; none: that of the preset"
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
        None, description="with a repository of the hub: its branch, tag or commit; none: the default branch"
    )
    run: Name | None = Field(
        None, description="another run on this coordinator, of the same shape: its parameters are state 0"
    )
    round: Annotated[int, Field(ge=0, lt=1 << 40)] | None = Field(
        None, description="with `run`: the checkpoint of that round; none: the latest"
    )
    lora: LoraSpec | None = Field(None, description="train adapters instead of the model")

    @model_validator(mode="after")
    def _one_at_most(self) -> "ModelSpec":
        given = [key for key in MODELS if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"give exactly one of preset, config, factory and pretrained, not {given}")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError('config needs a model_type, for example model_type = "llama"')
        check_layers(self.config or {})
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
    def is_said(self) -> bool:
        """True if the spec says what is trained; otherwise the workers' scripts do."""
        return any(getattr(self, key) is not None for key in MODELS)


class DataSpec(Section):
    """The training set: text, or token ids. Sources are on the worker, or where it can fetch them."""

    source: str = Field(
        "python-stdlib",
        min_length=1,
        description=(
            "on the worker, a directory or glob of text files, of .jsonl, .parquet or .bin files (ids of nanoGPT or "
            "llm.c), of .txt or .jsonl with .gz or .zst, or a token set by `outerstep data prepare`; the address of "
            'such a set, https://, hf://, s3://, gs:// or az://; or "hub:NAME[:CONFIG[:SPLIT]]", "python-stdlib", or '
            '"custom" for a script\'s own data'
        ),
    )
    tokenizer: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description=(
            'what makes ids of text: "bytes", a directory with a tokenizer.json, or a repository of the Hugging Face '
            "hub; default: bytes, or what a token set was made by"
        ),
    )
    column: Annotated[str, Field(min_length=1)] = Field(
        "text", description="the member of JSON lines, or the column of parquet files and of the hub, that has the text"
    )
    sequence_length: int = Field(256, gt=0, le=1 << 24, description="tokens per sequence")
    holdout: Fraction = Field(
        0.05,
        description=(
            "share kept out of training: of text files by hash of their name, of other documents by hash of their "
            "text; of .bin files those called val, or the end; a token set has its own"
        ),
    )
    private: bool = Field(
        False,
        description=(
            "every worker brings a training set of its own, of which it tells the length and the tokenizer alone: sets "
            "are not compared, units are counted per worker, and every worker measures the loss on what it holds out "
            "itself"
        ),
    )


class InnerSpec(Section):
    """The inner optimizer and its learning rates, keyed to global inner steps. With `data.source = "custom"` scripts
    bring both, and only `batch_size` and `joiner_warmup_steps` may be given."""

    batch_size: int = Field(8, gt=0, le=1 << 20, description="sequences per inner step; one batch is one work unit")
    optimizer: str = Field(
        "adamw",
        pattern=rf"^({'|'.join(OPTIMIZERS)}|[\w.]+:\w+)$",
        description=(
            'the inner optimizer; "muon" is Muon for the hidden matrices and AdamW for all else (MuLoCo); or your own '
            "module:function, called on the worker with the model and these settings, which returns one "
            "torch.optim.Optimizer or a list, each group with its peak learning rate. Default: muon for model.preset "
            "and model.config, adamw for the others"
        ),
        json_schema_extra={"default": "by the model"},
    )
    learning_rate: Rate = Field(
        4e-4,
        description=(
            "peak learning rate. Default: 0.4 / width for model.preset and a model.config that says its hidden_size, "
            "0.0004 at least and 0.008 at most; 0.0004 for the others"
        ),
        json_schema_extra={"default": "by the model"},
    )
    muon_learning_rate: Rate | None = Field(
        None,
        description=(
            "Muon's own peak learning rate; none: learning_rate, for Muon's steps are scaled to be as long as AdamW's"
        ),
    )
    beta1: Fraction = Field(0.9, description="AdamW's beta 1")
    beta2: Fraction = Field(0.95, description="AdamW's beta 2")
    momentum: Fraction = Field(0.9, description="momentum of SGD and Muon")
    weight_decay: float = Field(
        0.1, ge=0, le=1000, description="weight decay: AdamW's and Muon's, decoupled, or SGD's, L2"
    )
    clip_norm: Norm | Literal["none"] = Field(
        1.0, description='gradients are clipped to this global L2 norm; "none": they are not'
    )
    schedule: Literal["cosine", "wsd", "linear", "constant"] = Field(
        "cosine",
        description=(
            "the learning rate from the warmup's end to the run's: half a cosine, straight down, or constant; "
            '"wsd" (warmup, stable, decay) is constant and straight down at the end'
        ),
    )
    decay_fraction: float = Field(0.2, gt=0, le=1, description='with "wsd": share of all inner steps that decay')
    final_fraction: float = Field(0.1, ge=0, le=1, description="learning rate at the end, as a fraction of the peak")
    warmup_steps: int = Field(
        100,
        ge=0,
        le=1_000_000_000,
        description=(
            "W, inner steps of linear warmup: step s, counted from 0, has (s + 1) / W of the peak, so that the first "
            "one trains as well; transformers' schedules have s / W, the same rates one step later"
        ),
    )
    joiner_warmup_steps: int = Field(
        10,
        ge=0,
        le=1_000_000,
        description=(
            "inner steps of linear warmup, on top, of a worker that joins later: its optimizer starts cold. A script "
            "multiplies its learning rate by `diloco.warmup_scale`, and is warned if it does not"
        ),
    )

    def without_effect(self, given: set[str], *, by_scripts: bool) -> list[str]:
        """Return a sentence for each of the keys that were `given` and that nothing would read. With `by_scripts` the
        workers are scripts, which bring optimizer and schedule themselves."""
        if by_scripts:
            return [
                f'inner.{key} = {getattr(self, key)} does nothing with data.source = "custom", whose scripts make the '
                "optimizer and its schedule themselves: leave it out"
                for key in sorted(given - READ_BY_SCRIPTS)
            ]
        of_some = set().union(*OPTIMIZERS.values())
        idle = dict.fromkeys(of_some - OPTIMIZERS.get(self.optimizer, of_some), f'optimizer = "{self.optimizer}"')
        if self.schedule != "wsd":
            idle["decay_fraction"] = f'schedule = "{self.schedule}"'
        if self.schedule == "constant":
            idle["final_fraction"] = 'schedule = "constant"'
        return [
            f"inner.{key} = {getattr(self, key)} does nothing with {chosen}: leave it out"
            for key, chosen in sorted(idle.items())
            if key in given
        ]


class OuterSpec(Section):
    """The outer optimizer: Nesterov SGD on the averaged pseudo-gradient."""

    learning_rate: Rate = Field(1.0, description="outer learning rate")
    momentum: Fraction = Field(0.8, description="outer Nesterov momentum")


class SyncSpec(Section):
    """When and how the workers synchronise."""

    rounds: Rounds = Field(
        ..., description="outer steps until the run is finished; more where all workers handed rounds in early"
    )
    inner_steps: Steps | Literal["auto"] = Field(
        500, description='H, inner steps per round; "auto" gives each worker as many as it manages in round_s'
    )
    round_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = Field(
        None, description='with inner_steps = "auto", which needs it: seconds of inner steps per round'
    )
    nominal_inner_steps: Steps = Field(
        500,
        description='with "auto": inner steps per round in the schedules, and of a worker whose speed is not known yet',
    )
    min_inner_steps: Steps = Field(10, description='with "auto": fewest inner steps per round')
    max_inner_steps: Steps = Field(10_000, description='with "auto": most inner steps per round')
    upload_codec: CodecName = Field(
        "int8", description='codec of contributions; "sparse" needs many rounds and outer.momentum = 0'
    )
    download_codec: DownloadCodecName = Field("int8", description="codec of deltas")
    zstd: bool = Field(
        True,
        description="compress payloads by zstd: deltas always, uploads where the worker finds its line slow enough",
    )
    aggregation: Literal["screened", "clipped", "mean", "trimmed", "median"] = Field(
        "screened",
        description=(
            'rule by which contributions become a delta: "mean", weighted by tokens; "clipped", the same of what has '
            'no larger norm than others; "screened", the same without those who oppose the others; "trimmed" and '
            '"median" of each value'
        ),
    )
    fragment_elements: Annotated[int, Field(ge=256, le=1 << 28)] = Field(
        1 << 23, description="elements per fragment, at most"
    )
    fragment_layers: Literal["sequential", "strided"] = Field(
        "sequential", description='layers of a fragment: neighbours, or far apart ("strided", for offsets = "spread")'
    )
    offsets: Literal["together", "spread"] = Field(
        "together", description="when fragments are due: all at the end of the round, or one after the other within it"
    )
    overlap: Annotated[int, Field(ge=0, le=1 << 20)] | Literal["eager"] = Field(
        0,
        description=(
            "inner steps that go on while a fragment is sent, averaged and fetched (Streaming DiLoCo's tau); "
            '"eager": a whole round of them'
        ),
    )
    alpha: Literal["carry"] | Annotated[float, Field(ge=0, le=1)] = Field(
        "carry",
        description=(
            'what a worker goes on from: "carry", the new global parameters and what it has trained since it sent its '
            "own; a number mixes so much of its local parameters into the global ones (Streaming DiLoCo's alpha; 0 "
            "drops what it has trained since, 1 keeps all that is its own), with or without an overlap"
        ),
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "SyncSpec":
        if isinstance(self.overlap, int) and self.overlap >= self.schedule_steps:
            raise ValueError(
                f"overlap = {self.overlap} is a whole round or more; give less than {self.schedule_steps}, or "
                '"eager" for a whole round'
            )
        if self.aggregation in BY_VALUE and CODECS[self.upload_codec].add_weight is not None:
            raise ValueError(
                f'aggregation = "{self.aggregation}" compares the values of all workers, of which upload_codec = '
                f'"{self.upload_codec}" sends a few each; take "screened" or another codec'
            )
        if self.overlap == "eager" and self.offsets == "spread":
            raise ValueError('overlap = "eager" needs offsets = "together": every fragment has a whole round anyway')
        return self

    @property
    def streams(self) -> bool:
        """True if fragments are sent while training goes on, or at different times of the round, or are mixed."""
        return self.overlap != 0 or self.offsets == "spread" or self.alpha != "carry"

    @model_validator(mode="after")
    def _auto_needs_a_budget(self) -> "SyncSpec":
        if (self.inner_steps == "auto") != (self.round_s is not None):
            raise ValueError(f'inner_steps = {self.inner_steps!r}: give round_s with "auto", and only with it')
        if not self.min_inner_steps <= self.nominal_inner_steps <= self.max_inner_steps:
            raise ValueError(
                f"nominal_inner_steps = {self.nominal_inner_steps} lies outside min_inner_steps = "
                f"{self.min_inner_steps} to max_inner_steps = {self.max_inner_steps}"
            )
        return self

    def without_effect(self, given: set[str]) -> list[str]:
        """Return a sentence for each of the keys that were `given` and that nothing would read."""
        only_auto = (
            {"nominal_inner_steps", "min_inner_steps", "max_inner_steps"} if self.inner_steps != "auto" else set()
        )
        return [
            f'sync.{key} = {getattr(self, key)} does nothing without inner_steps = "auto": leave it out'
            for key in sorted(given & only_auto)
        ]

    @property
    def most_inner_steps(self) -> int:
        """Inner steps that a worker is given per round, at most."""
        return self.max_inner_steps if self.inner_steps == "auto" else self.inner_steps

    @property
    def schedule_steps(self) -> int:
        """Inner steps per round as the schedules count them: H, or `nominal_inner_steps` if each worker has its own.

        A worker that has done k of its own H inner steps of round r is at global inner step (r + k / H) · this.
        """
        return self.nominal_inner_steps if self.inner_steps == "auto" else self.inner_steps


class MembersSpec(Section):
    """Who is waited for, and for how long."""

    min_workers: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1, description="live workers needed to open and close a round"
    )
    lease_s: float = Field(60.0, ge=1, le=86_400, description="a worker silent for longer is taken for dead")
    grace_factor: float = Field(
        0.5, ge=0, le=100, description="stragglers get this share of the time that the quorum needed"
    )
    grace_min_s: Seconds = Field(5.0, description="shortest grace")
    grace_max_s: Seconds = Field(600.0, description="longest grace")
    round_max_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = Field(
        14_400.0,
        description="after so long a round closes even without a quorum, if min_workers have contributed",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "MembersSpec":
        if self.grace_min_s > self.grace_max_s:
            raise ValueError(f"grace_min_s = {self.grace_min_s} is larger than grace_max_s = {self.grace_max_s}")
        return self


class CheckpointSpec(Section):
    """Checkpoints of the outer state on the coordinator. The last state is always kept."""

    every_rounds: Rounds = Field(10, description="rounds between checkpoints")
    keep: int = Field(2, gt=0, le=100_000, description="checkpoints kept; deltas are kept back to the oldest of them")


class EvaluationSpec(Section):
    """Held-out loss of the global model, by two workers of different tokens per evaluated round, or by the only one."""

    every_rounds: Rounds = Field(1, description="rounds between evaluations; the first and last state always count")
    max_tokens: int = Field(65_536, gt=0, le=1 << 36, description="held-out tokens per evaluation, at most")


class GuardSpec(Section):
    """What happens when the model looks spoilt: its held-out loss has risen, by the word of two evaluations in a row,
    or its values have left their bounds."""

    action: Literal["tell", "pause", "rollback"] = Field(
        "pause",
        description="tell: an event, and no more (but values out of bounds always pause). pause: the run waits for its"
        " operator. rollback: it goes back to the newest checkpoint before that, leaves out who stands out among the"
        " contributors since, and goes on; if nobody does, or it happens again, it waits",
    )
    loss_rise: float = Field(
        0.5, gt=0, le=1e6, description="nats per token above the lowest held-out loss so far that count as spoilt"
    )


class RetentionSpec(Section):
    """History in the database. Files are kept as `checkpoints` says: what the newest checkpoint covers may go."""

    rounds: Rounds = Field(
        100,
        description="rounds of which each contribution and report is remembered; of older ones the sums and the loss",
    )
    events: int = Field(10_000, gt=0, le=100_000_000, description="events kept; older ones are deleted")
