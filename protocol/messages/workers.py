"""Messages about a worker: joining, its lease, its assignments, and facts about its machine."""

import math
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from protocol.fragments import Layout, TensorSpec
from protocol.messages.base import Account, Count, Finite, HexDigest, Printable, ReplyModel, RequestModel, RoundReport
from protocol.messages.runs import DataSummary, FrozenSummary
from protocol.text import check_printable
from protocol.wire import MAX_UNIT_RANGES, UnitRange

MAX_TENSORS = 100_000  # of a model; a mixture of hundreds of experts has half of that
LINE_CHECK_BYTES = 8 << 20  # the most bytes of one line check in either direction

MAX_FACTS, MAX_FACT_NAME, MAX_FACT_TEXT, MAX_PHASE = 32, 64, 256, 32  # facts; characters

HostDetail = Literal["all", "some", "nothing"]  # how much a worker reports about its machine
HostValue = str | int | float | bool | None


def _checked_host(host: Any) -> Any:
    """Return `host`. Raises ValueError for more or longer facts than a coordinator keeps, or facts of other types."""
    if not isinstance(host, dict):
        return host
    if len(host) > MAX_FACTS:
        raise ValueError(f"{len(host)} facts about a machine; at most {MAX_FACTS} are allowed")
    for name, value in host.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_FACT_NAME or not name.isprintable():
            raise ValueError(f"the name of a fact has 1 to {MAX_FACT_NAME} printable characters, not {_short(name)}")
        if not _is_fact(value):
            raise ValueError(
                f"{name} = {_short(value)}: give printable text of at most {MAX_FACT_TEXT} characters, a finite "
                "number, true, false or null"
            )
    return host


HostFacts = Annotated[dict[str, HostValue], BeforeValidator(_checked_host)]


def _is_fact(value: Any) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return -(1 << 63) <= value < 1 << 63
        case float():
            return math.isfinite(value)
        case str():
            return len(value) <= MAX_FACT_TEXT and value.isprintable()
        case _:
            return False


def _short(value: Any) -> str:
    """Return a short form of an invalid value, without building a long text first."""
    return repr(value[:MAX_FACT_NAME]) if isinstance(value, str) else type(value).__name__


def _printable_names(tensors: list[TensorSpec]) -> list[TensorSpec]:
    for tensor in tensors:
        check_printable(tensor.name)
    return tensors


def _printable_tokenizer(data: DataSummary | None) -> DataSummary | None:
    check_printable((data and data.tokenizer) or "")
    return data


class JoinRequest(RequestModel):
    """A request to join a run.

    `previous` is the member token of an earlier lease under this name. It proves that this is the same worker,
    restarted, so it need not wait for that lease to expire.

    `frozen` is left out if every parameter is trained.

    `member_token` is the worker's proposal for the new lease, a random secret, so that a join whose response was lost
    can be repeated like any PUT. Without it the coordinator chooses one.
    """

    tensors: Annotated[list[TensorSpec], FailFast(), Field(max_length=MAX_TENSORS), AfterValidator(_printable_names)]
    data: Annotated[DataSummary | None, AfterValidator(_printable_tokenizer)] = None
    frozen: Annotated[FrozenSummary | None, Field(exclude_if=lambda frozen: frozen is None)] = None
    previous: Annotated[str, Field(max_length=128)] | None = None
    member_token: Annotated[str, Field(pattern=r"^ost_[A-Za-z0-9_-]{43}$")] | None = None
    host: HostFacts = Field(default_factory=dict)


class JoinReply(ReplyModel):
    worker: str
    member_token: str  # the bearer token of all further requests of this worker
    epoch: int
    lease_s: float
    layout: Layout


class Metrics(BaseModel):
    """A worker's own measurements since it started. They are only displayed, except that
    `inner_steps_per_second` sets the number of inner steps unless `sync.wait` is "always".

    Unknown keys are ignored in requests too: a worker must not lose its lease over a metric that the coordinator does
    not know."""

    model_config = ConfigDict(extra="ignore")

    round: Count | None = None
    inner_step: Count | None = None
    loss: Finite | None = None
    tokens_per_second: Finite | None = None
    inner_steps_per_second: Finite | None = None
    mfu: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # model FLOPs utilisation: 0.45 is 45 %
    peak_memory_bytes: Count | None = None  # of the GPU, or of the process without one
    learning_rate: Finite | None = None  # at the last inner step; of the first parameter group
    upload_bytes: Count = 0
    download_bytes: Count = 0
    phase: Annotated[str, Field(max_length=MAX_PHASE), Printable] | None = None


class Directive(StrEnum):
    CONTINUE = "continue"
    DRAIN = "drain"  # finish the sync of the open round, then leave; the run may be resumed later
    STOP = "stop"  # the run is finished or was stopped: stop training, ask for an assignment


def _known_directive(directive: Any) -> Any:
    """Return the directive; `continue` for one that only later versions know."""
    return directive if directive in list(Directive) or not isinstance(directive, str) else Directive.CONTINUE


class LeaseReply(ReplyModel):
    directive: Annotated[Directive, BeforeValidator(_known_directive)]
    reason: str
    lease_s: float


class LeaveRequest(RequestModel):
    """A request to leave, with the state that the worker holds, which the coordinator compares with its own."""

    state_round: Count | None = None
    state_digest: HexDigest | None = None
    metrics: Metrics = Field(default_factory=Metrics)
    report: RoundReport | None = None  # since the previous report


class WorkerState(StrEnum):
    LIVE = "live"
    LOST = "lost"  # its lease expired
    LEFT = "left"
    EVICTED = "evicted"  # by the operator; it may join again
    BANNED = "banned"  # by the operator; it may not join again until readmitted


class WorkerChange(RequestModel):
    """An operator's change to a worker. `readmitted` lets a banned worker join again and ends a quarantine; `released`
    frees its name for the next worker that joins with another token."""

    state: Literal["evicted", "banned", "readmitted", "released"]


class WorkerInfo(ReplyModel):
    name: str
    state: WorkerState
    epoch: int
    joined_at: float
    last_seen_s: float | None  # seconds ago; null if it is not live
    host: HostFacts
    metrics: Metrics
    contributions: int
    tokens: int
    upload_bytes: int  # of accepted contributions
    direct: bool | None = None  # whether the last contribution went to the store directly; null if there was none
    account: Account = Field(default_factory=Account)
    divergences: int = 0  # how often it held a state other than the run's
    state_round: int | None  # when it left
    state_digest: HexDigest | None
    token: str | None = None  # the id of the token that the name belongs to
    score: float = 1.0  # the share of its contributions that counted, the latest weighted most
    quarantined_until: int | None = None  # the first round that it takes part in again


class Action(StrEnum):
    SEED = "seed"  # upload state 0, then ask again
    RECOVER = "recover"  # fetch state `round`, then ask again
    TRAIN = "train"  # train on `units`, contribute to `round`, fetch its deltas
    WAIT = "wait"  # nothing to do yet; ask again
    FINISH = "finish"  # the run has ended; leave


class AssignmentRequest(RequestModel):
    """A request for the next assignment.

    state_round  the state that the worker holds; null: none
    carried      half-open ranges of earlier rounds' work units whose work will be in its next contribution; its other
                 units of earlier rounds return to the pool when it gets work. Null: none returns
    report       the latest report; it counts once even if it is sent again
    rows         rows of the data set that a script's loader draws the run's units from; null: there is no such loader,
                 or each worker has its own data
    """

    state_round: Count | None = None
    carried: Annotated[list[UnitRange], Field(max_length=MAX_UNIT_RANGES, fail_fast=True)] | None = None
    report: RoundReport | None = None
    rows: Annotated[int, Field(gt=0, lt=1 << 60)] | None = None


class Assignment(ReplyModel):
    """What a worker does next.

    step            inner steps of the run's schedule before this round
    schedule_steps  inner steps of the schedule in this round: a worker that has done k of its `inner_steps` is at
                    step + k / inner_steps · schedule_steps. If they are the rest of the run's, the round is the last
    redone          how many rounds of the run were done again so far: each time, state `round` became another one
    """

    action: Action
    reason: str
    round: int
    step: int = 0
    schedule_steps: int = 0
    inner_steps: int = 0
    units: list[list[int]] = Field(default_factory=list)  # half-open ranges of work units of this round
    evaluate: bool = False  # measure and report the held-out loss of state `round`
    redone: int = 0
