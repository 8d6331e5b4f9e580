"""The database tables. Tensors are stored in blobs instead (`blobs.py`). Invariants are named constraints.

A worker is identified by its run and name. Times are seconds since 1970.
"""

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


# 64 bits in every database. SQLite's INTEGER has them, and only that type makes a primary key the row's number.
INTEGER = BigInteger().with_variant(Integer(), "sqlite")


def name_type(length: int) -> TypeEngine[str]:
    """Return the type of a name. Every database orders names by their bytes, as Python does."""
    return String(length).with_variant(String(length, collation="C"), "postgresql")


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        int: INTEGER,
    }


def _counter() -> Any:
    return mapped_column(default=0, server_default="0")


def _account() -> Any:
    """Return a column for an `Account`, which `rounds/accounting.py` adds to."""
    return mapped_column(default=dict, server_default="{}")


class TokenRow(Base):
    """A bearer token; only the hash of its secret is stored. The other columns are documented in
    `protocol.messages.TokenInfo`."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(name_type(16), primary_key=True)
    scope: Mapped[str] = mapped_column(name_type(16))
    note: Mapped[str] = mapped_column(name_type(200))
    secret_hash: Mapped[bytes] = mapped_column(unique=True)
    created_at: Mapped[float]
    run: Mapped[str | None] = mapped_column(name_type(64))
    worker: Mapped[str | None] = mapped_column(name_type(64))
    names: Mapped[int | None]
    uses: Mapped[int | None]
    used: Mapped[int] = _counter()
    parent: Mapped[str | None] = mapped_column(name_type(16))
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]


class AuditRow(Base):
    """An action done with a token, or on one. `run` is a name, because the entry outlives the run. `token` is an id,
    possibly of a revoked token; null if the coordinator itself acted."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    token: Mapped[str | None] = mapped_column(name_type(16))
    address: Mapped[str | None] = mapped_column(name_type(64))
    act: Mapped[str] = mapped_column(name_type(32))
    run: Mapped[str | None] = mapped_column(name_type(64))
    message: Mapped[str]


class RunRow(Base):
    """A run. `round` is the open or next round, and `step` the schedule's inner steps before it (`run/schedule.py`).
    `next_unit` is the first work unit that was never assigned. `spec_toml` is the spec as uploaded. `spec` has the
    defaults filled in, as they were when the run was created.

    `tokens` counts the tokens of the units that accepted contributions have consumed; the ranges of consumed units are
    checked against it. `checked_epochs` is the number of epochs that were checked. `guard` is a
    `coordinator.trust.guard.GuardRecord`. `rolled_back` is the last rollback (`round`, `from_round`, `place`; `stale`:
    after a round was done again, the workers that may still hold the state that it led to before; `redone`: how many
    rounds were done again), null if there was none. `equal_work` lists the groups of workers that were reported for
    sending the same contribution.
    """

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(name_type(64), unique=True)
    spec_toml: Mapped[str]
    spec_digest: Mapped[bytes]
    spec: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(name_type(16))
    created_at: Mapped[float]
    round: Mapped[int] = mapped_column(default=0)
    step: Mapped[int] = _counter()
    next_unit: Mapped[int] = mapped_column(default=0)
    layout: Mapped[dict[str, Any] | None]
    data: Mapped[dict[str, Any] | None]
    frozen: Mapped[dict[str, Any] | None]
    tokens: Mapped[int] = _counter()
    upload_bytes: Mapped[int] = _counter()
    divergences: Mapped[int] = _counter()
    checked_epochs: Mapped[int] = _counter()
    account: Mapped[dict[str, Any]] = _account()
    guard: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    rolled_back: Mapped[dict[str, Any] | None]
    equal_work: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")


class WorkerRow(Base):
    """A member of a run. `epoch` counts its joins. `token_hash` is null while it holds no lease. `token` is the id of
    the token that owns the name, even if it was revoked; null if the name was released, so that the next token to join
    will own it.

    `contributions` counts the rounds that it contributed to, and `place` the workers that joined the run before it.
    With private data, `units` is the number of units per epoch of the worker's own training set (null if not reported)
    and `unit_tokens` the weight of one, if it is conversations;
    `next_unit` and `checked_epochs` have the same meaning as in `RunRow`, for that set. `reputation` is a
    `coordinator.trust.quarantine.Reputation`, empty for a newcomer. `suspected` is True once the guard has reported the
    worker. `refuted_state` is the last state where its held-out loss differed from all others; null if there is none.
    `direct` is True if its last contribution was uploaded to the store directly; null if it has made none.
    """

    __tablename__ = "workers"
    __table_args__ = (UniqueConstraint("run_id", "name"), Index(None, "run_id", "place", unique=True))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    name: Mapped[str] = mapped_column(name_type(64))
    state: Mapped[str] = mapped_column(name_type(16))
    epoch: Mapped[int]
    token_hash: Mapped[bytes | None] = mapped_column(unique=True)
    joined_at: Mapped[float]
    host: Mapped[dict[str, Any]]
    metrics: Mapped[dict[str, Any]]
    state_round: Mapped[int | None]
    state_digest: Mapped[bytes | None]
    contributions: Mapped[int] = _counter()
    tokens: Mapped[int] = _counter()
    upload_bytes: Mapped[int] = _counter()
    direct: Mapped[bool | None]
    divergences: Mapped[int] = _counter()
    account: Mapped[dict[str, Any]] = _account()
    place: Mapped[int] = _counter()
    units: Mapped[int | None]
    unit_tokens: Mapped[int | None]
    next_unit: Mapped[int] = _counter()
    checked_epochs: Mapped[int] = _counter()
    token: Mapped[str | None] = mapped_column(name_type(16))
    reputation: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    suspected: Mapped[bool] = mapped_column(default=False, server_default="0")
    refuted_state: Mapped[int | None]


class UnitRangeRow(Base):
    """Work units [start, stop): assigned to a worker, consumed by an accepted contribution, or back in the pool.

    Units are numbered through all epochs of the training set. Units from `runs.next_unit` on have no row yet. With
    private data each worker has a separate range of numbers (`run/units/pools.py`). Once a round is over, adjacent
    consumed ranges are merged into one, without a worker.
    """

    __tablename__ = "unit_ranges"
    __table_args__ = (
        UniqueConstraint("run_id", "start"),
        CheckConstraint("start < stop", name="not_empty"),
        CheckConstraint("state IN ('free', 'assigned', 'consumed')", name="state"),
        CheckConstraint("state = 'consumed' OR (state = 'free') = (worker IS NULL)", name="free_has_no_worker"),
        CheckConstraint("(state = 'consumed') = (consumed_round IS NOT NULL)", name="consumed_once"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    start: Mapped[int]
    stop: Mapped[int]
    state: Mapped[str] = mapped_column(name_type(16))
    worker: Mapped[str | None] = mapped_column(name_type(64))
    round: Mapped[int | None]  # the round that they were assigned for
    consumed_round: Mapped[int | None]  # the round of the contribution that consumed them


class AssignmentRow(Base):
    """A worker's participation in a round. Its units are the unit ranges assigned to it for that round."""

    __tablename__ = "assignments"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(name_type(64), primary_key=True)
    inner_steps: Mapped[int]
    evaluate: Mapped[bool]


class RoundRow(Base):
    """A round that was opened, `step` inner steps into the schedule. `tokens`, `loss` and the byte counts are null
    until retention deletes the rows of its contributions and fragments; from then on they hold the sums of those
    rows."""

    __tablename__ = "rounds"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    opened_at: Mapped[float]
    closed_at: Mapped[float | None]  # when its last delta was published
    tokens: Mapped[int | None]
    loss: Mapped[float | None]
    upload_bytes: Mapped[int | None]
    delta_bytes: Mapped[int | None]
    quorum_at: Mapped[float | None]  # this and the next two: the latest time among the round's fragments
    collected_at: Mapped[float | None]
    aggregated_at: Mapped[float | None]
    account: Mapped[dict[str, Any]] = _account()  # every report is added, so it is always complete


class FragmentRow(Base):
    """One fragment of a round. `contributors` is set when collecting ends: {worker: tokens}. `late` lists the other
    live workers with an assignment. `verdicts` has how much each contributor counts in the delta: {worker: `Verdict`}.
    `reference` is the norm that they were judged by, null if nobody was in time. The residual is the delta's encoding
    error: null without error feedback, or if it is lost."""

    __tablename__ = "fragments"
    __table_args__ = (
        CheckConstraint("state IN ('collecting', 'aggregating', 'published')", name="state"),
        CheckConstraint("(state = 'published') = (delta_digest IS NOT NULL)", name="published_has_delta"),
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    fragment: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(name_type(16))
    reason: Mapped[str]
    contributors: Mapped[dict[str, Any] | None]
    late: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    reference: Mapped[float | None]
    verdicts: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    delta_bytes: Mapped[int | None]
    delta_digest: Mapped[bytes | None]
    residual_bytes: Mapped[int | None]
    residual_digest: Mapped[bytes | None]
    closed_at: Mapped[float | None]  # when collecting ended
    quorum_at: Mapped[float | None]
    aggregated_at: Mapped[float | None]
    published_at: Mapped[float | None]


class LateContributionRow(Base):
    """A contribution that arrived `late_s` after its fragment had closed, and was rejected."""

    __tablename__ = "late_contributions"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    fragment: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(name_type(64), primary_key=True)
    late_s: Mapped[float]


class ContributionRow(Base):
    """An acknowledged contribution: one per (run, round, fragment, worker). `sha256`: of its bytes, if its worker has
    uploaded it to the store; null if it came through the coordinator. `lateness`: a
    `coordinator.aggregation.tasks.Lateness`, null if no work of missed rounds is in it."""

    __tablename__ = "contributions"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    fragment: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(name_type(64), primary_key=True)
    digest: Mapped[bytes]
    sha256: Mapped[bytes | None]
    lateness: Mapped[list[Any] | None]
    size: Mapped[int]  # bytes
    tokens: Mapped[int]
    inner_steps: Mapped[int]
    loss: Mapped[float | None]  # null if the training loop reported none
    norm: Mapped[float]
    accepted_at: Mapped[float]


class ReportRow(Base):
    """A worker's report of what a round has cost (an `Account`), one for each epoch of its membership."""

    __tablename__ = "reports"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(name_type(64), primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[dict[str, Any]]


class OuterStateRow(Base):
    """The coordinator's own outer state of a fragment: the state before `round`, and its digest."""

    __tablename__ = "outer_states"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    fragment: Mapped[int] = mapped_column(primary_key=True)
    round: Mapped[int]
    state_digest: Mapped[bytes]


class CheckpointRow(Base):
    """A complete checkpoint: every fragment is durable."""

    __tablename__ = "checkpoints"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    state_digest: Mapped[bytes]


class CheckpointFragmentRow(Base):
    """One durable fragment of a checkpoint, which may be incomplete."""

    __tablename__ = "checkpoint_fragments"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    fragment: Mapped[int] = mapped_column(primary_key=True)
    size: Mapped[int]  # bytes
    digest: Mapped[bytes]
    state_digest: Mapped[bytes]


class EvaluationRow(Base):
    """The held-out loss (nats per token) of the state before `round`, as measured by `worker` on `tokens`, which
    represent `bytes` of text (null if unknown). `without` is the worker's `protocol.messages.WithoutReport`; null if it
    has sent none.

    Rounds that retention has summed up have one row; the mean of several workers has the worker "". `confirmed`: a
    majority of the workers that evaluated the state agrees, or only one was asked.
    """

    __tablename__ = "evaluations"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(name_type(64), primary_key=True)
    loss: Mapped[float]
    tokens: Mapped[int]
    bytes: Mapped[int | None]
    confirmed: Mapped[bool] = mapped_column(default=True, server_default="1")
    without: Mapped[dict[str, Any] | None]


class EventRow(Base):
    """An event of a run, with one sentence for the operator."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(name_type(32))
    message: Mapped[str]
    data: Mapped[dict[str, Any]]


class DeploymentRow(Base):
    """What all coordinators of this database have in common, in a single row. `secret`: the keys of sketches
    (`aggregation/measuring.py`) and of requests between coordinators are derived from it. `bucket_owner` and
    `bucket_url`: the bucket that has the blobs, and the id that it belongs to; null if they are in the data
    directory."""

    __tablename__ = "deployment"

    id: Mapped[int] = mapped_column(primary_key=True)
    secret: Mapped[bytes]
    bucket_owner: Mapped[str | None] = mapped_column(name_type(64))
    bucket_url: Mapped[str | None]


class LeaderRow(Base):
    """Which of several coordinators leads, in a single row (`store/lease.py`). `token` is the fencing token, which
    grows with every takeover. `expires_at`: by the database's clock. `holder`: the leader's id, null after it has given
    up the lease. `address`: where the others reach it."""

    __tablename__ = "leader"

    id: Mapped[int] = mapped_column(primary_key=True)
    token: Mapped[int]
    holder: Mapped[str | None] = mapped_column(name_type(64))
    address: Mapped[str | None]
    taken_at: Mapped[float]
    expires_at: Mapped[float]


class TaskRow(Base):
    """Work on a fragment's bytes that the leader leaves to an aggregator (`aggregation/queue.py`). `version`: only
    aggregators of this version do it. `task`: a `coordinator.aggregation.tasks.Task` as JSON. `urgency`: lower numbers
    first. `preferred`: the aggregator that has the fragment's state; null if none has.

    `token` is the fencing token, which grows whenever an aggregator takes the task. `holder`: the one that has it;
    null if none has. `expires_at`: by the database's clock. Once it is done, `result` is a `Result` as JSON, or
    `failure` a message; before that both are null."""

    __tablename__ = "tasks"

    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[str]
    task: Mapped[str]
    urgency: Mapped[int]
    preferred: Mapped[str | None] = mapped_column(name_type(64))
    created_at: Mapped[float]
    token: Mapped[int] = _counter()
    holder: Mapped[str | None] = mapped_column(name_type(64))
    expires_at: Mapped[float] = mapped_column(default=0.0, server_default="0")
    result: Mapped[str | None]
    failure: Mapped[str | None]


class AggregatorRow(Base):
    """An aggregator, as it was at `seen_at` (by the database's clock). `host`: its machine and process, HOST:PID."""

    __tablename__ = "aggregators"

    id: Mapped[str] = mapped_column(name_type(64), primary_key=True)
    host: Mapped[str]
    version: Mapped[str]
    seen_at: Mapped[float]


class CoordinatorRow(Base):
    """A coordinator that shares this database, as it was at `seen_at` (by the database's clock). `store_fault`: why it
    cannot use the blobs; empty if it can."""

    __tablename__ = "coordinators"

    id: Mapped[str] = mapped_column(name_type(64), primary_key=True)
    address: Mapped[str]
    version: Mapped[str]
    seen_at: Mapped[float]
    store_fault: Mapped[str]
