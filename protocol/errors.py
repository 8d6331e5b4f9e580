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
        └── NotUnderstood   a coordinator's answer, in words of another version

`Problem` is raised by the coordinator and raised again, with the same slug, by its clients (answers.py).
"""

from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from protocol.text import printable

PROBLEM_PREFIX = "urn:outerstep:problem:"


class Remedy(StrEnum):
    """What a client does about a problem."""

    RETRY = "retry"  # it sends the same again, after Retry-After or a backoff
    ACT = "act"  # it does what the meaning says, and goes on
    REFUSED = "refused"  # it ends: the same command would meet it again


class ProblemType(NamedTuple):
    """A row of PROBLEMS: the HTTP status, what a client does about it, and a sentence that says both to people."""

    status: int
    remedy: Remedy
    title: str


RETRY, ACT, REFUSED = Remedy

# By slug. docs/rest.md lists every one (tested).
PROBLEMS: dict[str, ProblemType] = {
    "invalid-message": ProblemType(422, REFUSED, "The JSON message is malformed; mend it and send it again."),
    "invalid-spec": ProblemType(422, REFUSED, "The run spec cannot be run; the detail names key and value."),
    "invalid-payload": ProblemType(400, REFUSED, "The payload's bytes break the wire format; nothing was kept."),
    "digest-mismatch": ProblemType(400, RETRY, "The bytes that arrived are not the bytes announced; send them again."),
    "request-timeout": ProblemType(408, RETRY, "The request stalled and was given up; send it again."),
    "length-required": ProblemType(411, REFUSED, "An upload needs a Content-Length."),
    "payload-too-large": ProblemType(413, REFUSED, "The body is larger than what is sent here can be."),
    "head-too-large": ProblemType(431, REFUSED, "The request's line and headers are larger than any sent here."),
    "too-many-requests": ProblemType(429, RETRY, "This token asks for more than its share; ask again when told."),
    "unauthorized": ProblemType(
        401, REFUSED, "No token, an unknown, revoked or expired one, or a member token of an ended lease."
    ),
    "forbidden": ProblemType(403, REFUSED, "The token is valid but its scope does not allow this."),
    "banned": ProblemType(403, REFUSED, "The operator has banned this worker from the run until it is readmitted."),
    "protocol-mismatch": ProblemType(
        409, REFUSED, "Client and coordinator are of versions that do not talk; the detail says which to change."
    ),
    "not-found": ProblemType(404, REFUSED, "There is nothing at this address."),
    "method-not-allowed": ProblemType(405, REFUSED, "This address does not take this method."),
    "not-published": ProblemType(404, ACT, "Not there yet; ask again. The detail says what is waited for."),
    "gone": ProblemType(410, ACT, "No longer there, as the detail says; recover from the latest checkpoint."),
    "file-lost": ProblemType(410, ACT, "The coordinator's disk has lost this file; take another checkpoint."),
    "range-not-satisfiable": ProblemType(416, ACT, "The Range lies outside the bytes."),
    "run-exists": ProblemType(
        409, REFUSED, "Another run has this name; a run's spec never changes. Choose a new name."
    ),
    "run-ended": ProblemType(409, ACT, "The run is finished or stopped and takes no more work."),
    "run-draining": ProblemType(
        409, RETRY, "The run is draining and takes no newcomers; ask again until it is paused, or goes on."
    ),
    "run-not-ended": ProblemType(409, REFUSED, "Only a run that is finished or stopped can be removed."),
    "worker-name-taken": ProblemType(
        409, REFUSED, "A live worker has this name; choose another, or wait for its lease."
    ),
    "rolled-back": ProblemType(409, REFUSED, "The run was rolled back meanwhile; look where it is now."),
    "worker-name-owned": ProblemType(
        409, REFUSED, "This name belongs to another token; choose another, or have an operator release it."
    ),
    "model-mismatch": ProblemType(
        409, REFUSED, "This worker's model is not the run's model; the detail says where it differs."
    ),
    "pin-mismatch": ProblemType(409, REFUSED, "The run's spec pins something else than what this worker brings."),
    "data-mismatch": ProblemType(409, REFUSED, "This worker's training set is not the run's training set."),
    "run-full": ProblemType(409, REFUSED, "The run has no numbers left for the units of another private training set."),
    "state-conflict": ProblemType(409, ACT, "State 0 is seeded once, by the worker that was asked to."),
    "round-closed": ProblemType(409, ACT, "The round closed without this contribution; carry the work into the next."),
    "round-not-open": ProblemType(409, ACT, "The round has not opened yet."),
    "contribution-conflict": ProblemType(
        409, ACT, "Another contribution of this worker was already accepted; it stands."
    ),
    "contribution-lost": ProblemType(
        409, ACT, "The coordinator has no such contribution of this worker, or has lost it; send it again."
    ),
    "stale-base": ProblemType(409, ACT, "Computed against another outer state than the run's; resync, then go on."),
    "units-not-held": ProblemType(409, ACT, "Work units that are named are not assigned to this worker."),
    "not-asked": ProblemType(409, ACT, "Another worker was asked to evaluate this state; nothing is lost."),
    "not-ready": ProblemType(503, RETRY, "The coordinator cannot serve just now; try again."),
    "storage-full": ProblemType(507, RETRY, "The coordinator's disk is full; it goes on when there is room."),
    "internal": ProblemType(500, RETRY, "A fault of the coordinator; its log has the request id."),
}


class OuterstepError(Exception):
    """Base of all exceptions that this project defines."""


class SpecError(OuterstepError):
    """A run spec that cannot be run."""


class LayoutError(OuterstepError):
    """Tensors that cannot be cut into fragments."""


class CodecError(OuterstepError):
    """Values that a codec cannot carry."""


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
    """Bytes that are not a valid payload; `fault` is the first one that a reader meets."""

    def __init__(self, fault: WireFault, message: str) -> None:
        super().__init__(fault, message)
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[1])


class Transient(OuterstepError):
    """A fault on the way that is worth another try; `retry_after_s` is the server's Retry-After, or None."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnexpectedAnswer(OuterstepError):
    """An answer that no coordinator gives."""


class BeyondLimits(UnexpectedAnswer):
    """An answer that is compressed or larger than any of its kind: it is not read."""


class NoCoordinator(UnexpectedAnswer):
    """No coordinator is at the address, or none that is trusted: another try does not help."""


class NotUnderstood(UnexpectedAnswer):
    """A coordinator's answer that this version does not understand: it speaks another protocol, or a later word of
    this one. Where it comes once, bits may have been flipped on the way; where it comes again, it is meant."""


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
        """Return the problem of a received document. Raises KeyError for one that is not a coordinator's."""
        slug = str(document["type"]).removeprefix(PROBLEM_PREFIX)
        known = {"type", "title", "status", "detail"}
        members = {key: value for key, value in document.items() if key not in known}
        return cls(slug, printable(str(document["detail"])), retry_after_s=retry_after_s, **members)

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle makes it of, between the processes of one worker."""
        return partial(Problem, retry_after_s=self.retry_after_s, **self.members), (self.slug, self.detail)

    def __str__(self) -> str:
        return f"{self.slug}: {self.detail}"
