"""Messages about a run: its state, training set, checkpoints, work units and events."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from protocol.fragments import Layout
from protocol.messages.base import Account, Count, HexDigest, ReplyModel, RequestModel
from protocol.spec.run import MAX_UNIT_TOKENS, RunSpec
from protocol.spec.sections import DataSpec


class DataSummary(RequestModel):
    """The identity of a worker's training set: a digest of its content, and its length in work units.

    `tokenizer` is the tokenizer that made its ids, which may have a different name on each worker; it and its digest
    are null for bytes, or if unknown.

    With `data.private` the digest is null: it would reveal whether a worker has a text that somebody else knows.

    `unit_tokens` is the weight of a unit of conversations in the mean: how many tokens of one are trained on, averaged
    over the set and rounded. Null for text, where every unit has `batch_size` · `sequence_length`.

    `crlf` is the name of the first text file in which lines end with CRLF, as on Windows. It explains a difference and
    is not compared. Null if there is none, or if it is unknown.
    """

    digest: HexDigest | None = None
    units: Annotated[int, Field(gt=0, lt=1 << 60)]
    tokenizer: Annotated[str, Field(max_length=4096)] | None = None
    tokenizer_digest: HexDigest | None = None
    unit_tokens: Annotated[int, Field(gt=0, le=MAX_UNIT_TOKENS)] | None = None
    crlf: Annotated[str, Field(max_length=4096)] | None = None

    def of_private_data(self) -> "DataSummary":
        """Return it without what is derived from the text."""
        return self.model_copy(update={"digest": None, "crlf": None})

    @model_serializer(mode="wrap")
    def _without_nulls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out nulls, so that the summary of bytes is the same as before tokenizers existed."""
        return {key: value for key, value in serialize(self).items() if value is not None}


class FrozenSummary(RequestModel):
    """The identity of the parameters that a worker does not train: a digest of their names, shapes and values, and
    their number of elements."""

    digest: HexDigest
    elements: Annotated[int, Field(gt=0, lt=1 << 60)]


def data_difference(worker: DataSummary | None, run: DataSummary | None, spec: DataSpec) -> str | None:
    """Return how a worker's training set differs from the run's; None if it does not. The tokenizer's name may differ,
    and with private data everything but the tokenizer: the same ids mean the same text everywhere."""
    if worker is not None and run is not None and worker.tokenizer_digest != run.tokenizer_digest:
        return (
            f"this worker's training set was made by the tokenizer {_tokenizer(worker)}, the run's by "
            f"{_tokenizer(run)}; use the run's tokenizer on this worker"
        )
    if spec.private or _identity(worker) == _identity(run):
        return None
    return (
        f"this worker's training set ({_data(worker)}) is not the run's ({_data(run)}){_line_ends(worker, run)}; "
        f"data.source = {spec.source!r} must have the same files everywhere; for a token set, `outerstep data "
        "show DIR` shows its digest and what it was made of"
    )


def _identity(data: DataSummary | None) -> object:
    return data and (data.digest, data.units, data.unit_tokens)


def _line_ends(worker: DataSummary | None, run: DataSummary | None) -> str:
    """Return how the ends of lines differ, if only one of the two has seen CRLF."""
    here, there = (data and data.crlf for data in (worker, run))
    if (here is None) == (there is None):
        return ""
    where = "this worker, but nowhere on the first" if there is None else "the first worker, but nowhere on this one"
    return (
        f": lines of {here or there} end with CRLF, as on Windows, on {where}. Convert them, for example with "
        "dos2unix, or set git's core.autocrlf to false"
    )


def _tokenizer(data: DataSummary) -> str:
    if data.tokenizer_digest is None:
        return data.tokenizer or "bytes"
    return f"{data.tokenizer} (BLAKE3 {data.tokenizer_digest})"


def _data(data: DataSummary | None) -> str:
    if data is None:
        return "none"
    trained = "" if data.unit_tokens is None else f" unit_tokens={data.unit_tokens}"
    return f"digest={data.digest} units={data.units}{trained}"


class RunState(StrEnum):
    SEEDING = "seeding"  # state 0 is not uploaded yet
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"  # the open round is finished, no other opens, and the workers leave; then the run is paused
    FINISHED = "finished"
    STOPPED = "stopped"


class Cause(StrEnum):
    """What holds a run up, the most serious first."""

    FILES_DAMAGED = "files-damaged"
    STORAGE_FULL = "storage-full"
    STORAGE_UNAVAILABLE = (
        "storage-unavailable"  # the database is locked or failing, it or the disk is read-only, or the bucket fails
    )
    WORKER_SILENT = "worker-silent"


class RunInfo(ReplyModel):
    name: str
    state: RunState
    reason: str  # one sentence: what the run is doing or waiting for
    held_up_by: Cause | None = None  # null if nothing is wrong
    round: int  # the open round; equals `rounds` when finished
    rounds: int  # in total, as far as is known: more than sync.rounds if all workers handed one in early
    step: int = 0  # inner steps of the schedule before the open round
    spec_digest: HexDigest
    created_at: float
    eta_s: float | None = None  # until the end, estimated from the last rounds; null if unknown or a round is overdue
    live_workers: int
    fragments: int | None  # null until the first worker has sent the model's shapes
    elements: int | None  # trained elements
    data: DataSummary | None = None  # of the first worker, like `frozen`; null if it sent none
    frozen: FrozenSummary | None = None  # also null if nothing is frozen
    tokens: int  # in accepted contributions
    upload_bytes: int  # of accepted contributions
    account: Account = Field(default_factory=Account)  # over all workers
    divergences: int = 0  # how often a worker held a state other than the run's and had to resync
    held_out_loss: float | None  # of the last evaluated state: see `RoundInfo`
    held_out_bits_per_byte: float | None = None
    state_digest: HexDigest | None  # of the finished run's outer state


class DiskBytes(ReplyModel):
    """Bytes of disk space of a run's files, by kind. A file with two names counts once."""

    contributions: int
    deltas: int
    checkpoints: int
    residuals: int = 0  # encoding errors of deltas, with a download codec that has error feedback
    state: int
    set_aside: int  # files newer than the database, which was restored from a backup


class RunDetail(RunInfo):
    disk_bytes: DiskBytes
    direct: bool = False  # workers can transfer payloads to and from the coordinator's store themselves
    spec: RunSpec


class RunChange(RequestModel):
    state: Literal["running", "paused", "draining", "stopped"]


class RollBack(RequestModel):
    """A request to roll back to checkpoint `to`. `from_round` is the round that the client last saw, so that a request
    that arrives twice takes effect once. The workers `without` are excluded from then on."""

    to: Count
    from_round: Count
    without: Annotated[list[str], Field(max_length=10_000)] = Field([])


class CheckpointFragment(ReplyModel):
    fragment: int
    elements: int
    bytes: int
    digest: HexDigest  # of the payload; also its ETag
    state_digest: HexDigest


class CheckpointInfo(ReplyModel):
    round: int
    created_at: float
    bytes: int
    state_digest: HexDigest
    damage: str | None = None  # why it cannot be fetched (its file is missing or corrupt); null if it can


class CheckpointDetail(CheckpointInfo):
    layout: Layout
    fragments: list[CheckpointFragment]


class EpochInfo(ReplyModel):
    """The work units of one epoch. units == consumed + free + sum(assigned); `consumed` never decreases."""

    worker: str | None = None  # with private data: the worker with this training set
    epoch: int
    first: int = 0  # number of its first unit: units are numbered across epochs
    units: int | None  # null if the training set's length is unknown; then there is one endless epoch
    consumed: int  # each in exactly one accepted contribution
    assigned: dict[str, int]  # by worker
    free: int | None  # not assigned yet, or back in the pool; null if `units` is


class UnitRangeInfo(ReplyModel):
    """Work units start, start + 1, …, stop - 1. Units in no range have not been assigned yet."""

    start: int
    stop: int
    state: Literal["free", "assigned", "consumed"]  # free: back in the pool
    worker: str | None  # null if free, or if consumed ranges were merged after their round
    round: int | None  # the round that they were assigned for
    consumed_round: int | None


class Event(ReplyModel):
    id: int
    at: float
    kind: str
    message: str
    data: dict[str, Any]
