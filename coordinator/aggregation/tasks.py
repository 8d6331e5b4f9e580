"""Tasks: work on the bytes of one fragment, described so completely that any process can do it, with the same result.

`Aggregate` makes a delta from the contributions to a closed fragment. `Advance` takes outer steps, and writes the
fragment of a checkpoint. The leader writes tasks into the database, and aggregators write the results.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.aggregation.judging import Judgement, Verdict
from protocol.spec.sections import OuterSpec, SyncSpec
from protocol.wire import Payload


class _Data(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex", ser_json_inf_nan="strings"
    )


class Lateness(NamedTuple):
    """What work of earlier rounds may be in a contribution, according to the coordinator's record; `Evidence` describes
    the first three fields. `units`: those of its work, if it weighs less since its worker is behind; otherwise 0."""

    late: int = 0
    missed: float = 0.0
    all_late: bool = False
    units: int = 0


NOT_LATE = Lateness()


class StateRef(_Data):
    """A fragment's outer state: the number of the round that starts from it, and its digest."""

    round: int
    digest: bytes


class Origin(_Data):
    """How a fragment's state is derived: from a checkpoint, with the deltas of the rounds after it.

    checkpoint  the state in it
    blob        digest of its blob
    deltas      digests of the deltas of rounds checkpoint.round, checkpoint.round + 1, …
    """

    checkpoint: StateRef
    blob: bytes
    deltas: tuple[bytes, ...]

    @property
    def round(self) -> int:
        """The round of the state after all deltas."""
        return self.checkpoint.round + len(self.deltas)


class Given(_Data):
    """A contribution that counts. `tokens`: its weight. `work`: the tokens of its work, if they are more.
    `sha256`: of its bytes, as the store has confirmed it; None if the coordinator has checked the bytes itself."""

    digest: bytes
    sha256: bytes | None
    tokens: int
    work: int = 0
    lateness: Lateness = NOT_LATE


class Collected(_Data):
    """The contributions to a closed fragment of `elements` values, by worker, and everything else that their mean's
    bytes depend on. `base`: the digest of the fragment's state. `residual`: the digest of the previous delta's
    residual; None: there is none, because it is lost or the download codec has no error feedback."""

    run: str
    round: int
    fragment: int
    elements: int
    base: bytes
    sync: SyncSpec
    contributions: dict[str, Given]
    residual: bytes | None = None


class Aggregate(Collected):
    """Judge the contributions, and make the delta.

    unit_tokens      by worker: the weight of one of its work units, in tokens
    usual            the median reference of the fragment's last rounds; None in its first one: then the norms of one or
                     two workers are also bounded by that of θ
    usual_spread     as `judge` has it
    clipped          as `judge` has it
    least_agreement  as `judge` has it
    state            the digest of the checkpoint's blob that has the fragment's state; None if no checkpoint has it
    excluded         workers whose contributions do not count, and why; if there are no others, they count
    """

    kind: Literal["aggregate"] = "aggregate"
    unit_tokens: dict[str, int]
    usual: float | None
    usual_spread: float | None = None
    clipped: float
    least_agreement: float
    state: bytes | None = None
    excluded: dict[str, str] = Field(default_factory=dict)


class Advance(_Data):
    """Derive the fragment's state after all of `origin.deltas`.

    elements    of the fragment
    known       the state that the run has: this one, or an earlier one since the checkpoint
    checkpoint  also put it into the store, as the fragment of a checkpoint
    """

    kind: Literal["advance"] = "advance"
    run: str
    fragment: int
    elements: int
    outer: OuterSpec
    origin: Origin
    known: StateRef
    checkpoint: bool

    @property
    def round(self) -> int:
        return self.origin.round


class Blob(_Data):
    """A blob in the store. `size`: in bytes."""

    digest: bytes
    size: int


class Aggregated(_Data):
    """The delta, a blob of `size` bytes with frames of `frame_bytes`, and the verdicts. `invalid`: the workers whose
    contribution is no valid payload. `residual`: the delta's encoding error; None without error feedback."""

    kind: Literal["aggregated"] = "aggregated"
    digest: bytes
    size: int
    frame_bytes: tuple[int, ...]
    reference: float | None
    verdicts: dict[str, Verdict]
    close: tuple[tuple[str, str, float], ...]
    invalid: tuple[str, ...]
    residual: Blob | None = None

    @classmethod
    def of(
        cls, judgement: Judgement, invalid: tuple[str, ...], digest: bytes, delta: Payload, residual: Blob | None
    ) -> "Aggregated":
        close = tuple((*pair, distance) for pair, distance in judgement.close.items())
        return cls(
            digest=digest,
            size=delta.total_bytes,
            frame_bytes=tuple(delta.header.frame_bytes),
            reference=judgement.reference,
            verdicts=judgement.verdicts,
            close=close,
            invalid=invalid,
            residual=residual,
        )

    @property
    def judgement(self) -> Judgement:
        return Judgement(self.reference, self.verdicts, {(one, other): share for one, other, share in self.close})


class Advanced(_Data):
    """The state. `largest`: the largest magnitude of its values; NaN if one of them is NaN. `checkpoint`: its blob, if
    it was asked for."""

    kind: Literal["advanced"] = "advanced"
    digest: bytes
    largest: float
    checkpoint: Blob | None


Task = Annotated[Aggregate | Advance, Field(discriminator="kind")]
Result = Annotated[Aggregated | Advanced, Field(discriminator="kind")]
TASK: TypeAdapter[Aggregate | Advance] = TypeAdapter(Task)
RESULT: TypeAdapter[Aggregated | Advanced] = TypeAdapter(Result)
