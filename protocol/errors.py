"""The exceptions, and the table of problems that the REST interface answers with.

    OuterstepError
    ├── SpecError          a run spec that cannot be run: which key, which value, what is allowed
    ├── LayoutError        a model that cannot be cut into fragments
    ├── CodecError         values that a codec cannot carry (NaN, infinity, too large): the caller's fault
    ├── WireError          bytes that are not a valid payload: the peer's fault
    ├── Problem            a refusal as it travels over HTTP (RFC 9457); `slug` is one of PROBLEMS
    ├── Transient          a fault on the way to the coordinator that is worth another try
    └── UnexpectedAnswer   an answer that no coordinator of this version gives
        ├── BeyondLimits    an answer that is compressed or larger than any of its kind
        ├── NoCoordinator   no coordinator is at the address, or none that is trusted: another try does not help
        └── NotUnderstood   a coordinator's answer that this version does not understand

`Problem` is raised by the coordinator and raised again, with the same slug, by its clients (answers.py).
"""

from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from protocol.text import printable

PROBLEM_PREFIX = "urn:outerstep:problem:"


class Remedy(StrEnum):
    """What a client does about a problem."""

    RETRY = "retry"  # it resends the request after Retry-After or a backoff
    ACT = "act"  # it does what the title says, and continues
    REFUSED = "refused"  # it exits: retrying the same command would fail again


class ProblemType(NamedTuple):
    """A row of PROBLEMS: the HTTP status, what a client does about it, and a sentence for people."""

    status: int
    remedy: Remedy
    title: str


RETRY, ACT, REFUSED = Remedy

# By slug. docs/rest.md has the same table (tested).
PROBLEMS: dict[str, ProblemType] = {
    "invalid-message": ProblemType(422, REFUSED, "Malformed JSON message. Fix it and resend it."),
    "invalid-spec": ProblemType(422, REFUSED, "Invalid run spec. The detail names the key and the value."),
    "invalid-payload": ProblemType(400, REFUSED, "The payload violates the wire format. Nothing was stored."),
    "digest-mismatch": ProblemType(400, RETRY, "The received bytes do not match the announced digest. Resend them."),
    "invalid-request": ProblemType(400, REFUSED, "The request is not valid HTTP, or its target is not a path."),
    "request-timeout": ProblemType(408, RETRY, "The request stalled and timed out. Resend it."),
    "length-required": ProblemType(411, REFUSED, "An upload needs a Content-Length."),
    "payload-too-large": ProblemType(413, REFUSED, "The body exceeds the limit for this request."),
    "head-too-large": ProblemType(431, REFUSED, "The request line and headers exceed the limit."),
    "too-many-requests": ProblemType(
        429, RETRY, "Rate limit exceeded for this token. Retry after the time in Retry-After."
    ),
    "unauthorized": ProblemType(
        401, REFUSED, "The token is missing, unknown, revoked or expired, or is the member token of an ended lease."
    ),
    "forbidden": ProblemType(403, REFUSED, "The token is valid, but its scope does not allow this request."),
    "banned": ProblemType(403, REFUSED, "This worker is banned from the run until the operator readmits it."),
    "protocol-mismatch": ProblemType(
        409, REFUSED, "Client and coordinator speak different protocols. The detail says which to upgrade."
    ),
    "not-found": ProblemType(404, REFUSED, "Nothing exists at this address."),
    "method-not-allowed": ProblemType(405, REFUSED, "This address does not support this method."),
    "not-published": ProblemType(404, ACT, "Not available yet. The detail says what is missing; ask again."),
    "gone": ProblemType(410, ACT, "No longer available, as the detail says. Recover from the latest checkpoint."),
    "file-lost": ProblemType(410, ACT, "The coordinator lost this file. Use another checkpoint."),
    "range-not-satisfiable": ProblemType(416, ACT, "The Range is outside the file."),
    "run-exists": ProblemType(
        409, REFUSED, "Another run has this name, and a run's spec never changes. Choose a new name."
    ),
    "run-ended": ProblemType(409, ACT, "The run is finished or stopped and accepts no more work."),
    "run-draining": ProblemType(
        409, RETRY, "The run is draining and accepts no new workers. Retry until it is paused or resumed."
    ),
    "run-not-ended": ProblemType(409, REFUSED, "Only a finished or stopped run can be removed."),
    "worker-name-taken": ProblemType(
        409, REFUSED, "A live worker has this name. Choose another, or wait until its lease expires."
    ),
    "rolled-back": ProblemType(409, REFUSED, "The run was rolled back in the meantime. Check its current round first."),
    "worker-name-owned": ProblemType(
        409, REFUSED, "This name belongs to another token. Choose another, or ask an operator to release it."
    ),
    "model-mismatch": ProblemType(
        409, REFUSED, "This worker's model differs from the run's model. The detail says where."
    ),
    "pin-mismatch": ProblemType(409, REFUSED, "This worker's digest differs from the one pinned in the run's spec."),
    "data-mismatch": ProblemType(409, REFUSED, "This worker's training set differs from the run's training set."),
    "run-full": ProblemType(409, REFUSED, "The run has no unit numbers left for another private training set."),
    "state-conflict": ProblemType(409, ACT, "State 0 is uploaded once, by the worker that was asked to seed it."),
    "round-closed": ProblemType(
        409, ACT, "The round closed without this contribution. Carry the work into the next round."
    ),
    "round-not-open": ProblemType(409, ACT, "The round is not open yet."),
    "contribution-conflict": ProblemType(
        409, ACT, "Another contribution of this worker was already accepted and is kept."
    ),
    "contribution-lost": ProblemType(
        409, ACT, "The coordinator does not have this contribution, or lost it. Resend it."
    ),
    "not-uploaded": ProblemType(
        409, ACT, "The store does not have these bytes. Ask for an address again, and upload them."
    ),
    "stale-base": ProblemType(
        409, ACT, "Computed against a different outer state than the run's. Resync, then continue."
    ),
    "units-not-held": ProblemType(409, ACT, "Some of the work units are not assigned to this worker."),
    "not-asked": ProblemType(409, ACT, "Another worker was asked to evaluate this state. Nothing is lost."),
    "not-ready": ProblemType(503, RETRY, "The coordinator is temporarily unavailable. Retry."),
    "superseded": ProblemType(503, RETRY, "Another coordinator leads now, or will soon. Retry."),
    "storage-full": ProblemType(507, RETRY, "The coordinator's disk is full. Retry until there is space."),
    "internal": ProblemType(500, RETRY, "Internal error of the coordinator. Its log has the request id."),
}


class OuterstepError(Exception):
    """Base of all exceptions that this project defines."""


class SpecError(OuterstepError):
    """A run spec that cannot be run."""


class LayoutError(OuterstepError):
    """Tensors that cannot be cut into fragments."""


class CodecError(OuterstepError):
    """Values that a codec cannot represent."""


class WireFault(StrEnum):
    """What is wrong with a payload, by the names of docs/wire-format.md ("The kinds of faults")."""

    LENGTH = "length"
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    FRAMES = "frames"
    ZSTD = "zstd"
    CODES = "codes"
    MAGNITUDE = "magnitude"


class WireError(OuterstepError):
    """Bytes that are not a valid payload. `fault` is the first one that a reader finds."""

    def __init__(self, fault: WireFault, message: str) -> None:
        super().__init__(fault, message)
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[1])


class Transient(OuterstepError):
    """A failure on the way to the coordinator that can be retried. `retry_after_s`: the Retry-After header, or None."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnexpectedAnswer(OuterstepError):
    """A response that no coordinator gives."""


class BeyondLimits(UnexpectedAnswer):
    """A response that is compressed or larger than any of its kind, and is not read."""


class NoCoordinator(UnexpectedAnswer):
    """No coordinator is at the address, or none that is trusted: retrying does not help."""


class NotUnderstood(UnexpectedAnswer):
    """A coordinator's response that this version does not understand: it speaks another protocol, or uses a later
    addition to this one. If it happens once, bits may have flipped on the way; if it repeats, it is real."""


class Problem(OuterstepError):
    """A refusal with a stable type, as RFC 9457 describes it.

    `members` are extension members of the problem document (for example `round` with `round-closed`);
    `retry_after_s` becomes the Retry-After header.
    """

    def __init__(self, slug: str, detail: str, *, retry_after_s: float | None = None, **members: Any) -> None:
        super().__init__(detail)
        if slug not in PROBLEMS:
            raise KeyError(f"{slug!r} is not in PROBLEMS")
        self.slug = slug
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.members = members

    @property
    def status(self) -> int:
        return PROBLEMS[self.slug].status

    @property
    def remedy(self) -> Remedy:
        return PROBLEMS[self.slug].remedy

    def document(self) -> dict[str, Any]:
        """Return the application/problem+json document."""
        return {
            "type": PROBLEM_PREFIX + self.slug,
            "title": PROBLEMS[self.slug].title,
            "status": self.status,
            "detail": self.detail,
            **self.members,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any], *, retry_after_s: float | None = None) -> "Problem":
        """Return the problem in a received document. Raises KeyError if it is not a coordinator's."""
        slug = str(document["type"]).removeprefix(PROBLEM_PREFIX)
        known = {"type", "title", "status", "detail"}
        members = {key: value for key, value in document.items() if key not in known}
        return cls(slug, printable(str(document["detail"])), retry_after_s=retry_after_s, **members)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, between the processes of one worker."""
        return partial(Problem, retry_after_s=self.retry_after_s, **self.members), (self.slug, self.detail)

    def __str__(self) -> str:
        return f"{self.slug}: {self.detail}"
