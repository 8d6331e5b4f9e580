"""The JSON messages of the REST interface. docs/rest.md shows where each is used.

Requests with unknown keys are rejected, except for keys of metrics. Replies may gain keys, so clients must ignore those
they do not know.

Times are seconds since 1970 (UTC), unless the name ends in `_s`, which is a duration in seconds. Digests are
hexadecimal.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from protocol.messages.base import (
    SUCCESSIVE,
    Account,
    Count,
    Finite,
    HexDigest,
    Page,
    Printable,
    ReplyModel,
    RequestModel,
    RoundReport,
    Stage,
)
from protocol.messages.rounds import (
    DIRECT_HEADER_BYTES,
    MAX_WITHOUT,
    ContributionReply,
    DirectUpload,
    Evaluation,
    EvaluationReply,
    EvaluationReport,
    FragmentInfo,
    FragmentState,
    LateContribution,
    PartReply,
    RoundDetail,
    RoundInfo,
    UploadGrant,
    Verdict,
    Waiting,
    Waits,
    WithoutLosses,
    WithoutReport,
)
from protocol.messages.runs import (
    Cause,
    CheckpointDetail,
    CheckpointFragment,
    CheckpointInfo,
    DataSummary,
    DiskBytes,
    EpochInfo,
    Event,
    FrozenSummary,
    RollBack,
    RunChange,
    RunDetail,
    RunInfo,
    RunState,
    UnitRangeInfo,
    data_difference,
)
from protocol.messages.server import (
    DEFAULT_NAMES,
    DEFAULT_USES,
    JOIN_PREFIX,
    MAX_TOKEN_S,
    AggregatorInfo,
    AuditEntry,
    BackupInfo,
    ClientsInfo,
    CoordinatorInfo,
    DatabaseInfo,
    DiskInfo,
    ExchangeRequest,
    Finding,
    Health,
    LoggedError,
    NewToken,
    NotificationsInfo,
    Readiness,
    Scope,
    Secret,
    ServerStatus,
    TokenInfo,
    TokenRequest,
    TokenSelf,
    UseCount,
)
from protocol.messages.workers import (
    LINE_CHECK_BYTES,
    MAX_FACT_NAME,
    MAX_FACT_TEXT,
    MAX_FACTS,
    MAX_PHASE,
    MAX_TENSORS,
    Action,
    Assignment,
    AssignmentRequest,
    Directive,
    HostDetail,
    HostFacts,
    HostValue,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaveRequest,
    Metrics,
    WorkerChange,
    WorkerInfo,
    WorkerState,
)
