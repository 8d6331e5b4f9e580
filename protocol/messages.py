"""The JSON messages of the REST interface. docs/rest.md says where each is used.

Requests refuse unknown keys, but for those of metrics; replies may gain keys, so clients must ignore those they do not
know.
Times are seconds since 1970 (UTC) unless the name ends in `_s`, a duration in seconds. Digests are hexadecimal.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    computed_field,
    model_serializer,
    model_validator,
)

from protocol.fragments import Layout, TensorSpec
from protocol.host import MAX_PHASE, ToldHost
from protocol.printable import check_printable
from protocol.spec.run import RunSpec
from protocol.spec.sections import Name
from protocol.wire import MAX_UNIT_RANGES, UnitRange

Item = TypeVar("Item")
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Printable = AfterValidator(check_printable)
MAX_TENSORS = 100_000  # of a model; a mixture of hundreds of experts has half of that
LINE_CHECK_BYTES = 8 << 20  # at most, of one line check in either direction


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Reply(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Page(_Reply, Generic[Item]):
    """A page of a listing; `next` is the cursor for `?after=` of the following page, or null at the end."""

    items: Annotated[list[Item], FailFast()]
    next: str | None = None


# --- accounts: bytes and seconds ----------------------------------------------------------------------------------


class Stage(StrEnum):
    """A stage of a worker's time.

    Those up to `leave` follow one another, so that their seconds add up to all of it; the others lie within them, on
    threads of their own, and overlap.
    """

    JOIN = "join"
    SEED = "seed"
    RECOVER = "recover"
    WAIT = "wait"  # for a round to open
    EVALUATE = "evaluate"
    TRAIN = "train"  # inner steps
    GATHER = "gather"  # pseudo-gradients
    SYNC = "sync"  # from the pseudo-gradients to the outer step of the last fragment
    LEAVE = "leave"
    SNAPSHOT = "snapshot"
    ENCODE = "encode"
    UPLOAD = "upload"  # until it is acknowledged, attempts and pauses between them included
    AWAIT_DELTA = "await-delta"  # until its first byte
    DOWNLOAD = "download"
    OUTER_STEP = "outer-step"  # decoding included


SUCCESSIVE = frozenset(list(Stage)[: list(Stage).index(Stage.LEAVE) + 1])


class Account(_Reply):
    """The sum of workers' reports on their rounds. Bytes are of payloads, repeated attempts included.
    Seconds of a stage are those during which at least one thread of a worker was in it."""

    upload_bytes: int = 0
    download_bytes: int = 0
    seconds: dict[Stage, float] = Field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """The workers' time in seconds: the sum over the successive stages."""
        return sum(seconds for stage, seconds in self.seconds.items() if stage in SUCCESSIVE)


class RoundReport(_Request):
    """One worker's bytes and seconds in one round: since its last report, which mostly ended the round before.

    `epoch` is that of the worker's membership when it made the report; by epoch and round a report that is sent again
    is recognised and counts once.
    """

    round: Count
    epoch: Count
    upload_bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    download_bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    seconds: dict[Stage, Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]]


# --- runs ---------------------------------------------------------------------------------------------------------


class DataSummary(_Request):
    """The identity of a worker's training set: a digest of its content, and its length in work units.

    `tokenizer` and its digest are of the tokenizer that made its ids; null for bytes, or where nobody knows. It may
    have another name on each worker.

    With `data.private` the digest is null: it would tell whether a worker has a text that somebody else knows.
    """

    digest: HexDigest | None = None
    units: Annotated[int, Field(gt=0, lt=1 << 60)]
    tokenizer: Annotated[str, Field(max_length=4096)] | None = None
    tokenizer_digest: HexDigest | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is null: what is told of bytes is what it was before there were tokenizers."""
        return {key: value for key, value in serialize(self).items() if value is not None}


class FrozenSummary(_Request):
    """The identity of the parameters that a worker does not train: a digest of their names, shapes and values, and how
    many elements they have."""

    digest: HexDigest
    elements: Annotated[int, Field(gt=0, lt=1 << 60)]


class RunState(StrEnum):
    SEEDING = "seeding"  # state 0 is not there yet
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"  # the open round is finished, no other opens, the workers leave; then it is paused
    FINISHED = "finished"
    STOPPED = "stopped"


class Cause(StrEnum):
    """What holds a run up, the gravest first."""

    FILES_DAMAGED = "files-damaged"
    STORAGE_FULL = "storage-full"
    STORAGE_UNAVAILABLE = "storage-unavailable"  # the database is locked, read-only or fails; or the disk is read-only
    WORKER_SILENT = "worker-silent"


class RunInfo(_Reply):
    name: str
    state: RunState
    reason: str  # one sentence: what the run is doing or waiting for
    held_up_by: Cause | None = None  # null where nothing is wrong: then it does what its state says
    round: int  # the open round; equals `rounds` when finished
    rounds: int  # in all, as far as is known: more than sync.rounds where all workers handed one in early
    step: int = 0  # inner steps of the schedule before the open round
    spec_digest: HexDigest
    created_at: float
    eta_s: float | None = None  # until its end, by its last rounds; null if unknown, or a round is overdue
    live_workers: int
    fragments: int | None  # null until the first worker has sent the model's shape
    elements: int | None  # that are trained
    data: DataSummary | None = None  # of the first worker, as is `frozen`; null where it did not say
    frozen: FrozenSummary | None = None  # null where nothing is frozen as well
    tokens: int  # trained on, in accepted contributions
    upload_bytes: int  # accepted contributions
    account: Account = Field(default_factory=Account)  # over all workers
    divergences: int = 0  # times that a worker was found to hold another state than the run's, and had to resync
    held_out_loss: float | None  # of the latest state that was evaluated: see `RoundInfo`
    held_out_bits_per_byte: float | None = None
    state_digest: HexDigest | None  # of the finished run's outer state


class DiskBytes(_Reply):
    """The disk space of a run's files in bytes, by kind. A file with two names counts once."""

    contributions: int
    deltas: int
    checkpoints: int
    state: int
    set_aside: int  # files that are newer than a database that was restored from a backup


class RunDetail(RunInfo):
    disk_bytes: DiskBytes
    spec: RunSpec


class RunChange(_Request):
    state: Literal["running", "paused", "draining", "stopped"]


class RollBack(_Request):
    """An order to go back to checkpoint `to`. `from_round` is the round at which the run was seen, so that an order
    that arrives twice is carried out once; the workers `without` take no part any more."""

    to: Count
    from_round: Count
    without: Annotated[list[str], Field(max_length=10_000)] = []


# --- workers ------------------------------------------------------------------------------------------------------


def _of_printable_names(tensors: list[TensorSpec]) -> list[TensorSpec]:
    for tensor in tensors:
        check_printable(tensor.name)
    return tensors


def _of_a_printable_tokenizer(data: DataSummary | None) -> DataSummary | None:
    check_printable((data and data.tokenizer) or "")
    return data


class JoinRequest(_Request):
    """A request to join a run.

    `previous` is the member token of an earlier lease under this name: it proves that this is the same worker,
    restarted, so that it need not wait for that lease to expire.

    `frozen` is left out where every parameter is trained.

    `member_token` is the worker's proposal for the new lease, a random secret: a join whose answer was lost can then be
    repeated, like any PUT. Without it the coordinator chooses one.
    """

    tensors: Annotated[list[TensorSpec], FailFast(), Field(max_length=MAX_TENSORS), AfterValidator(_of_printable_names)]
    data: Annotated[DataSummary | None, AfterValidator(_of_a_printable_tokenizer)] = None
    frozen: Annotated[FrozenSummary | None, Field(exclude_if=lambda frozen: frozen is None)] = None
    previous: Annotated[str, Field(max_length=128)] | None = None
    member_token: Annotated[str, Field(pattern=r"^ost_[A-Za-z0-9_-]{43}$")] | None = None
    host: ToldHost = Field(default_factory=dict)


class JoinReply(_Reply):
    worker: str
    member_token: str  # the bearer token of everything else that this worker does
    epoch: int
    lease_s: float
    layout: Layout


class Metrics(BaseModel):
    """A worker's own measurements, since it started. They are for display only, but for `inner_steps_per_second`: with
    `sync.inner_steps = "auto"` it decides the number of inner steps.

    Unknown keys are ignored, in requests as well: a worker must not lose its lease for a figure that the coordinator
    does not know."""

    model_config = ConfigDict(extra="ignore")

    round: Count | None = None
    inner_step: Count | None = None
    loss: Finite | None = None
    tokens_per_second: Finite | None = None
    inner_steps_per_second: Finite | None = None
    mfu: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # model FLOPs utilisation: 0.45 is 45 %
    peak_memory_bytes: Count | None = None  # of the GPU, or of the process where there is none
    learning_rate: Finite | None = None  # of the last inner step; of several groups that of the first
    private_contributions: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # that it made, [privacy]
    upload_bytes: Count = 0
    download_bytes: Count = 0
    phase: Annotated[str, Field(max_length=MAX_PHASE), Printable] | None = None


class Directive(StrEnum):
    CONTINUE = "continue"
    DRAIN = "drain"  # finish the sync of the open round, then leave; the operator may resume the run later
    STOP = "stop"  # the run is finished or was stopped: train no further, ask for an assignment


def _known_directive(told: Any) -> Any:
    """A directive that there is only in later versions is passed over."""
    return told if told in list(Directive) or not isinstance(told, str) else Directive.CONTINUE


class LeaseReply(_Reply):
    directive: Annotated[Directive, BeforeValidator(_known_directive)]
    reason: str
    lease_s: float


class LeaveRequest(_Request):
    """A request to leave, with the state that the worker holds, for comparison with the coordinator's."""

    state_round: Count | None = None
    state_digest: HexDigest | None = None
    metrics: Metrics = Field(default_factory=Metrics)
    report: RoundReport | None = None  # of the time since the last one


class WorkerState(StrEnum):
    LIVE = "live"
    LOST = "lost"  # its lease expired
    LEFT = "left"
    EVICTED = "evicted"  # by the operator; it may join again
    BANNED = "banned"  # by the operator; it may not join again until it is readmitted


class WorkerChange(_Request):
    """An operator's order concerning a worker. `readmitted` lets a banned one join again, and ends a quarantine;
    `released` lets whoever joins next with another token have its name."""

    state: Literal["evicted", "banned", "readmitted", "released"]


class WorkerInfo(_Reply):
    name: str
    state: WorkerState
    epoch: int
    joined_at: float
    last_seen_s: float | None  # seconds ago; null if it is not live
    host: ToldHost
    metrics: Metrics
    contributions: int
    tokens: int
    upload_bytes: int  # accepted contributions
    account: Account = Field(default_factory=Account)
    divergences: int = 0  # times that it was found to hold another state than the run's
    state_round: int | None  # as it left
    state_digest: HexDigest | None
    token: str | None = None  # the id of the token that the name belongs to
    score: float = 1.0  # how much of its contributions has counted, the last ones most
    quarantined_until: int | None = None  # the round from which on it takes part again


class Action(StrEnum):
    SEED = "seed"  # upload state 0, then ask again
    RECOVER = "recover"  # fetch state `round`, then ask again
    TRAIN = "train"  # train on `units`, contribute to `round`, fetch its deltas
    WAIT = "wait"  # nothing yet; ask again
    FINISH = "finish"  # the run has ended; leave


class AssignmentRequest(_Request):
    """A request for the next thing to do.

    state_round  the state that the worker holds; null for none
    carried      half-open ranges of earlier rounds' work units whose work will be in its next contribution; its other
                 units of earlier rounds return to the pool when it is told to train. Null: none returns
    report       the latest one; sent again, it counts once
    rows         of the data set from which a script's loader draws the run's units; null: none does, or each worker has
                 data of its own
    """

    state_round: Count | None = None
    carried: Annotated[list[UnitRange], Field(max_length=MAX_UNIT_RANGES, fail_fast=True)] | None = None
    report: RoundReport | None = None
    rows: Annotated[int, Field(gt=0, lt=1 << 60)] | None = None


class Assignment(_Reply):
    """What a worker does next.

    step            inner steps of the run's schedule before this round
    schedule_steps  those of this round; a worker that has done k of its `inner_steps` is at step + k / inner_steps of
                    them. Where they are the rest of the run's, the round is the last
    """

    action: Action
    reason: str
    round: int
    step: int = 0
    schedule_steps: int = 0
    inner_steps: int = 0
    units: list[list[int]] = Field(default_factory=list)  # half-open ranges of work units, this round's
    evaluate: bool = False  # measure the held-out loss of the state `round` and report it


class EpochInfo(_Reply):
    """The work units of one epoch. units == consumed + free + the sum of `assigned`; `consumed` never goes down."""

    worker: str | None = None  # with private data: of whose training set
    epoch: int
    first: int = 0  # the number of its first unit: units are numbered through all epochs
    units: int | None  # null if the training set's length is unknown: then there is one epoch, without an end
    consumed: int  # trained on, in exactly one accepted contribution each
    assigned: dict[str, int]  # by worker
    free: int | None  # not assigned yet, or back in the pool; null like `units`


class UnitRangeInfo(_Reply):
    """Work units start, start + 1, …, stop - 1. What is in no range was not assigned yet."""

    start: int
    stop: int
    state: Literal["free", "assigned", "consumed"]  # free: back in the pool
    worker: str | None  # null if free, and once consumed ranges were joined after their round
    round: int | None  # that they were assigned for
    consumed_round: int | None


# --- rounds -------------------------------------------------------------------------------------------------------


class FragmentState(StrEnum):
    COLLECTING = "collecting"
    AGGREGATING = "aggregating"
    PUBLISHED = "published"


class Verdict(_Reply):
    """What a contribution counts in its delta: `factor` times its weight; 0 where it is left out. `reason` says why it
    is not 1. `ratio`: its norm, by the coordinator, as a multiple of the fragment's `reference`; `cosine`: the median
    of its cosines with each of the others that count; null where there is nothing to compare with."""

    factor: float
    reason: str = ""
    ratio: float | None = None
    cosine: float | None = None


class FragmentInfo(_Reply):
    fragment: int
    state: FragmentState
    reason: str
    contributors: list[str]
    verdicts: dict[str, Verdict] = Field(default_factory=dict)  # by contributor, once it is published
    reference: float | None = None
    closes_in_s: float | None  # null if no deadline is running
    quorum_at: float | None = None
    closed_at: float | None = None  # collecting ended
    aggregated_at: float | None = None
    published_at: float | None = None
    delta_bytes: int | None
    delta_digest: HexDigest | None


class RoundInfo(_Reply):
    round: int
    state: FragmentState  # the least advanced of its fragments
    reason: str
    opened_at: float
    closes_in_s: float | None = None  # of the fragment whose reason this is; null if no deadline is running
    quorum_at: float | None = None  # this and the next two: when the last of its fragments had reached this
    collected_at: float | None = None
    aggregated_at: float | None = None
    closed_at: float | None  # the last delta was published
    tokens: int
    loss: float | None  # mean training loss over the contributors, weighted by tokens
    # Of the state that the round started from, nats per token: the mean over those who have measured it, weighted by
    # tokens. With private data these are the round's workers, each on what it holds out; otherwise one of them.
    held_out_loss: float | None
    held_out_bits_per_byte: float | None = None  # the same in bits per byte of text; null if the bytes are not known
    upload_bytes: int  # accepted contributions
    delta_bytes: int
    account: Account = Field(default_factory=Account)  # over its workers


class LateContribution(_Reply):
    """A contribution that came after its fragment had closed, by the coordinator's clock. Its work is carried over."""

    worker: str
    fragment: int
    late_s: float


class Evaluation(_Reply):
    """A held-out loss, as `EvaluationReport` tells it. `confirmed`: whoever else was asked says the same, or nobody
    was."""

    loss: float
    tokens: int
    bytes: int | None = None
    confirmed: bool = True

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text, by which tokenizers can be compared; None if the bytes are not known."""
        return None if self.bytes is None else self.loss / math.log(2) * self.tokens / self.bytes


class RoundDetail(RoundInfo):
    """A round with its fragments. `accounts` are by worker; each reports on a round when it asks for the next. So are
    `evaluations`, of the state that the round started from."""

    fragments: list[FragmentInfo]
    accounts: dict[str, Account] = Field(default_factory=dict)
    evaluations: dict[str, Evaluation] = Field(default_factory=dict)
    late: list[LateContribution] = Field(default_factory=list)


class ContributionReply(_Reply):
    round: int
    fragment: int
    digest: HexDigest
    created: bool  # false if the same contribution had been accepted before


class PartReply(_Reply):
    """A part of a payload has arrived; `missing` are the first of the half-open ranges of bytes that have not."""

    missing: list[tuple[int, int]]


class EvaluationReport(_Request):
    """A held-out loss, mean nats per token, the number of tokens that it was measured on, and the bytes of text that
    these stand for; null if that is not known."""

    loss: Finite
    tokens: Annotated[int, Field(gt=0, lt=1 << 60)]
    bytes: Annotated[int, Field(gt=0, lt=1 << 60)] | None = None


# --- checkpoints, events, tokens ----------------------------------------------------------------------------------


class CheckpointFragment(_Reply):
    fragment: int
    elements: int
    bytes: int
    digest: HexDigest  # of the payload; also its ETag
    state_digest: HexDigest


class CheckpointInfo(_Reply):
    round: int
    created_at: float
    bytes: int
    state_digest: HexDigest
    damage: str | None = None  # why it cannot be fetched: its file is missing or corrupt; null where it can


class CheckpointDetail(CheckpointInfo):
    layout: Layout
    fragments: list[CheckpointFragment]


class Event(_Reply):
    id: int
    at: float
    kind: str
    message: str
    data: dict[str, Any]


class Scope(StrEnum):
    ADMIN = "admin"
    OPERATOR = "operator"  # what runs a run: pause, resume, drain, stop; evict, ban, readmit, release
    WORKER = "worker"
    VIEWER = "viewer"
    JOIN = "join"  # to be exchanged, box by box, for worker tokens


NAMES = 1  # of a worker token that does not say how many
USES = 100  # of a join token that does not say how many
JOIN_PREFIX = "ostj_"  # of a join token's secret, by which a worker knows that it is to be exchanged
MAX_TOKEN_S = 100 * 365 * 86_400.0  # how long a token that ends may last
Times = Annotated[int, Field(ge=1, le=1_000_000)]
Secret = Annotated[str, Field(pattern=r"^ost_[A-Za-z0-9_-]{43}$")]
_UNLESS_NULL = Field(exclude_if=lambda value: value is None)


class TokenRequest(_Request):
    """A request for a token. `run`: the only run that it is for; null: all. `expires_in_s`: after how many seconds it
    ends; null: never. `names`, of a worker token: under how many names workers may join with it. `uses`, of a join
    token: how often it may be exchanged."""

    scope: Scope
    note: Annotated[str, Field(max_length=200)] = ""
    run: Annotated[Name | None, _UNLESS_NULL] = None
    expires_in_s: Annotated[Annotated[float, Field(gt=0, le=MAX_TOKEN_S)] | None, _UNLESS_NULL] = None
    names: Annotated[Times | None, _UNLESS_NULL] = None
    uses: Annotated[Times | None, _UNLESS_NULL] = None

    @model_validator(mode="after")
    def _of_its_scope(self) -> Self:
        if self.names is not None and self.scope is not Scope.WORKER:
            raise ValueError(f"names is for worker tokens, and this is to be of scope {self.scope}")
        if self.uses is not None and self.scope is not Scope.JOIN:
            raise ValueError(f"uses is for join tokens, and this is to be of scope {self.scope}")
        return self


class ExchangeRequest(_Request):
    """`token`: the worker token that a join token is exchanged for. The worker has drawn it, so that an exchange whose
    answer was lost can be repeated."""

    token: Secret


class TokenInfo(_Reply):
    id: str
    scope: Scope
    note: str
    created_at: float
    run: str | None = None  # the only one that it is for; null: all
    worker: str | None = None  # the only name that it joins under, as it was made for in exchange
    names: int | None = None  # under how many names workers may join with it; null: any number
    uses: int | None = None  # how often it may be exchanged, of a join token
    used: int = 0  # and was so far
    parent: str | None = None  # the id of the join token that it was exchanged for
    expires_at: float | None = None
    last_used_at: float | None = None  # to a minute after a restart


class NewToken(TokenInfo):
    token: str  # shown this once


class TokenSelf(_Reply):
    """The token that a request is sent with, as far as its holder has to know it: what it allows, of which run.

    id      the token's; of a member token that of the token which the worker joined with
    scope   null for a member token
    allows  the scopes whose requests it may send, its own among them; none for a member token, which acts as `worker`
    run     the only run that it is for; null: all
    worker  the only worker that it is for
    """

    id: str | None
    scope: Scope | None
    allows: list[Scope]
    run: str | None
    worker: str | None


class AuditEntry(_Reply):
    """One act: who did it, by the id of the token and the address that the request came from, and to what. Null is the
    coordinator itself."""

    id: int
    at: float
    token: str | None
    address: str | None
    act: str
    run: str | None
    message: str


class Health(_Reply):
    status: str
    version: str
    protocol: int  # that it speaks


class Readiness(Health):
    """`last_backup_at`: when the coordinator's last good backup by schedule was made; null where there is none."""

    last_backup_at: float | None


# --- the coordinator itself ---------------------------------------------------------------------------------------


class Finding(_Reply):
    """Something that is wrong. `about`: the type of the notification of it, or `database` or `notifications`; `run`:
    null if it is about the server; `remedy`: what to do next."""

    about: str
    run: str | None
    message: str
    remedy: str


class DiskInfo(_Reply):
    """A file system. `places`: what of the coordinator's lies on it, `data` or `database` or both."""

    places: list[str]
    free_bytes: int
    size_bytes: int


class DatabaseInfo(_Reply):
    """`schema_revision`, `size_bytes` and `answer_s`, the time of one query, are null while it does not answer; `fault`
    says why."""

    backend: str
    schema_revision: str | None
    size_bytes: int | None
    answer_s: float | None
    fault: str


class BackupInfo(_Reply):
    """Scheduled backups. `fault`: why the last one failed; empty if it did not."""

    every_s: float
    last_at: float | None
    failed_at: float | None
    fault: str


class ClientsInfo(_Reply):
    """What is connected: workers that hold a lease, streams of events, connections."""

    workers: int
    streams: int
    connections: int


class LoggedError(_Reply):
    """A warning or an error of the log, as it was logged last; `count`: how often since the start."""

    at: float
    level: str
    logger: str
    message: str
    count: int


class NotificationsInfo(_Reply):
    """The webhook. `pending` wait to be sent; `dropped` were given up since the start; `fault`: why the last attempt
    failed, empty if it did not."""

    host: str
    format: str
    signed: bool
    pending: int
    dropped: int
    sent_at: float | None
    failed_at: float | None
    fault: str


class ServerStatus(_Reply):
    """How the coordinator is. `findings`: what is wrong, and nothing else; `backup` and `notifications` are null where
    there are none; `errors`: the newest first."""

    version: str
    protocol: int
    started_at: float
    now: float
    findings: list[Finding]
    disks: list[DiskInfo]
    database: DatabaseInfo
    backup: BackupInfo | None
    notifications: NotificationsInfo | None
    clients: ClientsInfo
    errors: list[LoggedError]
