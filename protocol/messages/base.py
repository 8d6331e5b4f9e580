"""Shared by all messages: base classes, common types, pages, and accounts of bytes and seconds."""

from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from protocol.text import check_printable

Item = TypeVar("Item")
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Printable = AfterValidator(check_printable)


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReplyModel(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Page(ReplyModel, Generic[Item]):
    """A page of a list. `next` is the value of `?after=` for the following page; null on the last page."""

    items: Annotated[list[Item], FailFast()]
    next: str | None = None


class Stage(StrEnum):
    """A stage of a worker's time.

    The stages up to `leave` run one after another, so their seconds add up to the worker's total time. The others run
    within them, on separate threads, and overlap.
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
    UPLOAD = "upload"  # until it is acknowledged, including retries and the pauses between them
    AWAIT_DELTA = "await-delta"  # until its first byte
    DOWNLOAD = "download"
    OUTER_STEP = "outer-step"  # including decoding


SUCCESSIVE = frozenset(list(Stage)[: list(Stage).index(Stage.LEAVE) + 1])


class Account(ReplyModel):
    """The sum of workers' round reports. Bytes are payload bytes, including retries. The seconds of a stage are those
    during which at least one thread of a worker was in it. `dropped_steps`: inner steps that a worker did after it had
    sent everything, and dropped because the run went on further before it had the deltas."""

    upload_bytes: int = 0
    download_bytes: int = 0
    seconds: dict[Stage, float] = Field(default_factory=dict)
    dropped_steps: int = 0

    @property
    def total_s(self) -> float:
        """The workers' time in seconds: the sum over the successive stages."""
        return sum(seconds for stage, seconds in self.seconds.items() if stage in SUCCESSIVE)


def added(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of an account and another one, or a report, as JSON."""
    seconds = a.get("seconds", {})
    counts = {name: a.get(name, 0) + b[name] for name in ("upload_bytes", "download_bytes", "dropped_steps")}
    return counts | {
        "seconds": seconds | {stage: seconds.get(stage, 0.0) + more for stage, more in b["seconds"].items()}
    }


class RoundReport(RequestModel):
    """One worker's bytes, seconds and dropped inner steps since its previous report, usually those of one round.

    `epoch` is that of the worker's membership when it made the report. Epoch and round identify a report, so one that
    is sent again counts once.
    """

    round: Count
    epoch: Count
    upload_bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    download_bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    seconds: dict[Stage, Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]]
    dropped_steps: Count = 0
