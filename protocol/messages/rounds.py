"""Messages about a round: its fragments, contributions and evaluations."""

import math
from enum import StrEnum
from typing import Annotated

from pydantic import Field, computed_field

from protocol.messages.base import Account, Finite, HexDigest, ReplyModel, RequestModel
from protocol.spec.sections import Name

MAX_WITHOUT = 1024  # workers that are left out, one at a time
DIRECT_HEADER_BYTES = 24 << 10  # a contribution with a longer header is uploaded through the coordinator


class FragmentState(StrEnum):
    COLLECTING = "collecting"
    AGGREGATING = "aggregating"
    PUBLISHED = "published"


class Verdict(ReplyModel):
    """How much a contribution counts in its delta: `factor` times its weight; 0: left out. `reason`: why the factor is
    not 1. `ratio`: its norm as measured by the coordinator, as a multiple of the fragment's `reference`. `cosine`: the
    median of its cosine similarities with the other contributions that count. Both are null if there is nothing to
    compare with."""

    factor: float
    reason: str = ""
    ratio: float | None = None
    cosine: float | None = None


class FragmentInfo(ReplyModel):
    fragment: int
    state: FragmentState
    reason: str
    contributors: list[str]
    verdicts: dict[str, Verdict] = Field(default_factory=dict)  # by contributor, once the delta is published
    reference: float | None = None
    closes_in_s: float | None  # null if no deadline is running
    quorum_at: float | None = None
    closed_at: float | None = None  # collecting ended
    aggregated_at: float | None = None
    published_at: float | None = None
    delta_bytes: int | None
    delta_digest: HexDigest | None


class RoundInfo(ReplyModel):
    round: int
    state: FragmentState  # the least advanced of its fragments
    reason: str
    opened_at: float
    closes_in_s: float | None = None  # of the fragment that `reason` is about; null if no deadline is running
    quorum_at: float | None = None  # this and the next two: when the last of its fragments reached this point
    collected_at: float | None = None
    aggregated_at: float | None = None
    closed_at: float | None  # the last delta was published
    tokens: int
    loss: float | None  # mean training loss of the contributors, weighted by tokens
    # Of the state that the round started from, in nats per token: the mean over the workers that measured it, weighted
    # by tokens. With private data all the round's workers do, each on its own held-out data; otherwise one of them.
    held_out_loss: float | None
    held_out_bits_per_byte: float | None = None  # the same in bits per byte of text; null if the bytes are unknown
    upload_bytes: int  # of accepted contributions
    delta_bytes: int
    account: Account = Field(default_factory=Account)  # sum over its workers


class LateContribution(ReplyModel):
    """A contribution that arrived `late_s` seconds after its fragment had closed. Its work is carried over."""

    worker: str
    fragment: int
    late_s: float


class Evaluation(ReplyModel):
    """A held-out loss from an `EvaluationReport`. `confirmed`: the other worker that was asked reported the same, or no
    other was asked."""

    loss: float
    tokens: int
    bytes: int | None = None
    confirmed: bool = True

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text, comparable across tokenizers; None if the bytes are unknown."""
        return None if self.bytes is None else self.loss / math.log(2) * self.tokens / self.bytes


class Waits(ReplyModel):
    """For what a worker's training stood still in a round, in seconds, estimated from its report and from the
    coordinator's own times.

    upload       to encode and upload its contribution
    workers      for contributions of other workers, after its own had arrived
    coordinator  for screening and averaging
    download     to download the deltas and take the outer step
    opening      for a round to open
    """

    upload: float = 0.0
    workers: float = 0.0
    coordinator: float = 0.0
    download: float = 0.0
    opening: float = 0.0

    @property
    def total_s(self) -> float:
        return self.upload + self.workers + self.coordinator + self.download + self.opening


class Adds(ReplyModel):
    """What a worker adds to a round. `tokens` and `weight`: its shares of those of all contributions, the weight as it
    counts in the mean. `held_s`: the seconds for which the training of all others stood still because its contribution
    was missing; null until another worker has reported on the round."""

    tokens: float
    weight: float
    held_s: float | None


class Waiting(ReplyModel):
    """How much of the workers' time in a round was spent waiting, and how much less it would have been, as shares of
    that time.

    share      the time in which training stood still
    never      saved without `sync.wait = "always"`; null if the run does not have it
    doubled_h  saved by twice as many inner steps per round
    """

    share: float
    never: float | None
    doubled_h: float


class RoundDetail(RoundInfo):
    """A round with its fragments. `accounts` are by worker; a worker reports on a round when it asks for the next one.
    `evaluations`, of the state that the round started from, are by worker too."""

    fragments: list[FragmentInfo]
    accounts: dict[str, Account] = Field(default_factory=dict)
    evaluations: dict[str, Evaluation] = Field(default_factory=dict)
    late: list[LateContribution] = Field(default_factory=list)
    waits: dict[str, Waits] = Field(default_factory=dict)  # by worker, like `accounts`
    adds: dict[str, Adds] = Field(default_factory=dict)  # by worker with an assignment, once the round is published
    waiting: Waiting | None = None  # of all workers that have reported; null if none has


class ContributionReply(ReplyModel):
    round: int
    fragment: int
    digest: HexDigest
    created: bool  # false if the same contribution had been accepted before


class DirectUpload(RequestModel):
    """A contribution that its worker uploads to the store itself.

    header   the payload before its first frame, prefix included, in base64
    bytes    the length of the whole payload
    digest   its BLAKE3 digest
    sha256   its SHA-256 digest, which the store checks
    """

    header: Annotated[str, Field(max_length=4 * DIRECT_HEADER_BYTES // 3)]
    bytes: Annotated[int, Field(gt=0, lt=1 << 60)]
    digest: HexDigest
    sha256: HexDigest


class UploadGrant(ReplyModel):
    """Where to upload a contribution: PUT the payload to `url`, once, with exactly these headers, within `expires_s`.
    Then commit it. `url` is null if it is `accepted` already, or if it must go through the coordinator, for `reason`.
    """

    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    expires_s: float = 0.0
    accepted: bool = False
    reason: str = ""


class PartReply(ReplyModel):
    """A part of a payload has arrived. `missing`: the first half-open ranges of bytes that have not arrived yet."""

    missing: list[tuple[int, int]]


class EvaluationReport(RequestModel):
    """A held-out loss in mean nats per token, the number of tokens it was measured on, and their length in bytes of
    text; null if unknown."""

    loss: Finite
    tokens: Annotated[int, Field(gt=0, lt=1 << 60)]
    bytes: Annotated[int, Field(gt=0, lt=1 << 60)] | None = None


class EvaluationReply(ReplyModel):
    """What else to measure of the state: its loss as it would be without the last contribution of each of these
    workers, one at a time. Empty: nothing."""

    without: list[str] = Field(default_factory=list)


class WithoutLosses(RequestModel):
    """Held-out losses on the same tokens, in mean nats per token: of the state as it is, and, by worker, as it would be
    without that worker's last contribution."""

    loss: Finite
    without: Annotated[dict[Name, Finite], Field(min_length=1, max_length=MAX_WITHOUT)]


class WithoutReport(RequestModel):
    """What single contributions have done to a state: at x, the point that is evaluated, and at θ, from which workers
    train on; null if the two are the same."""

    reached: WithoutLosses
    start: WithoutLosses | None = None
