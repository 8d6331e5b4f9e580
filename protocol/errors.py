"""The exceptions, and the table of problems that the REST interface answers with.

    OuterstepError
    ├── SpecError          a run spec that cannot be run: which key, which value, what is allowed
    ├── LayoutError        a model that cannot be cut into fragments
    ├── CodecError         values that a codec cannot carry (NaN, infinity, too large): the caller's fault
    ├── WireError          bytes that are not a valid payload: the peer's fault
    └── Problem            a refusal as it travels over HTTP (RFC 9457); `slug` is one of PROBLEMS

`Problem` is raised by the coordinator and raised again, with the same slug, by the worker's client.
"""

from http import HTTPStatus
from typing import Any

PROBLEM_PREFIX = "urn:outerstep:problem:"

# slug -> (HTTP status, what it means and what to do). docs/rest.md lists every one (tested).
PROBLEMS: dict[str, tuple[HTTPStatus, str]] = {
    "invalid-message": (HTTPStatus.UNPROCESSABLE_ENTITY, "The JSON message is malformed; mend it and send it again."),
    "invalid-spec": (HTTPStatus.UNPROCESSABLE_ENTITY, "The run spec cannot be run; the detail names key and value."),
    "invalid-payload": (HTTPStatus.BAD_REQUEST, "The payload's bytes break the wire format; nothing was kept."),
    "digest-mismatch": (HTTPStatus.BAD_REQUEST, "The bytes that arrived are not the bytes announced; send them again."),
    "request-timeout": (HTTPStatus.REQUEST_TIMEOUT, "The upload stalled and was given up; send it again."),
    "length-required": (HTTPStatus.LENGTH_REQUIRED, "An upload needs a Content-Length."),
    "payload-too-large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is larger than what is sent here can be."),
    "unauthorized": (
        HTTPStatus.UNAUTHORIZED,
        "No token, an unknown or revoked one, or a member token of an ended lease.",
    ),
    "forbidden": (HTTPStatus.FORBIDDEN, "The token is valid but its scope does not allow this."),
    "banned": (HTTPStatus.FORBIDDEN, "The operator has banned this worker from the run until it is readmitted."),
    "not-found": (HTTPStatus.NOT_FOUND, "There is nothing at this address."),
    "method-not-allowed": (HTTPStatus.METHOD_NOT_ALLOWED, "This address does not take this method."),
    "not-published": (HTTPStatus.NOT_FOUND, "Not there yet; ask again. The detail says what is waited for."),
    "gone": (HTTPStatus.GONE, "Deleted by the retention rule; recover from the latest checkpoint."),
    "range-not-satisfiable": (HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "The Range lies outside the bytes."),
    "run-exists": (HTTPStatus.CONFLICT, "Another run has this name; a run's spec never changes. Choose a new name."),
    "run-ended": (HTTPStatus.CONFLICT, "The run is finished or stopped and takes no more work."),
    "worker-name-taken": (HTTPStatus.CONFLICT, "A live worker has this name; choose another, or wait for its lease."),
    "model-mismatch": (HTTPStatus.CONFLICT, "This worker's model is not the run's model; the detail names the tensor."),
    "data-mismatch": (HTTPStatus.CONFLICT, "This worker's training set is not the run's training set."),
    "state-conflict": (HTTPStatus.CONFLICT, "State 0 is seeded once, by the worker that was asked to."),
    "round-closed": (HTTPStatus.CONFLICT, "The round closed without this contribution; carry the work into the next."),
    "round-not-open": (HTTPStatus.CONFLICT, "The round has not opened yet."),
    "contribution-conflict": (
        HTTPStatus.CONFLICT,
        "Another contribution of this worker was already accepted; it stands.",
    ),
    "contribution-lost": (
        HTTPStatus.CONFLICT,
        "The coordinator has no such contribution of this worker, or has lost it; send it again.",
    ),
    "stale-base": (HTTPStatus.CONFLICT, "Computed against another outer state than the run's; resync, then go on."),
    "units-not-held": (HTTPStatus.CONFLICT, "Work units that are named are not assigned to this worker."),
    "not-ready": (HTTPStatus.SERVICE_UNAVAILABLE, "The coordinator cannot serve just now; try again."),
    "storage-full": (HTTPStatus.INSUFFICIENT_STORAGE, "The coordinator's disk is full; it goes on when there is room."),
    "internal": (HTTPStatus.INTERNAL_SERVER_ERROR, "A fault of the coordinator; its log has the request id."),
}


class OuterstepError(Exception):
    """Base of everything this project raises on purpose."""


class SpecError(OuterstepError):
    """A run spec that cannot be run."""


class LayoutError(OuterstepError):
    """Tensors that cannot be cut into fragments."""


class CodecError(OuterstepError):
    """Values that a codec cannot carry."""


class WireError(OuterstepError):
    """Bytes that are not a valid payload."""


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
        return int(PROBLEMS[self.slug][0])

    def document(self) -> dict[str, Any]:
        """The application/problem+json document."""
        return {
            "type": PROBLEM_PREFIX + self.slug,
            "title": PROBLEMS[self.slug][1],
            "status": self.status,
            "detail": self.detail,
            **self.members,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any], *, retry_after_s: float | None = None) -> "Problem":
        """The problem of a received document. KeyError for one that is not ours (a proxy's, say)."""
        slug = str(document["type"]).removeprefix(PROBLEM_PREFIX)
        known = {"type", "title", "status", "detail"}
        members = {key: value for key, value in document.items() if key not in known}
        return cls(slug, str(document["detail"]), retry_after_s=retry_after_s, **members)

    def __str__(self) -> str:
        return f"{self.slug}: {self.detail}"
