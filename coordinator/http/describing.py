"""What OpenAPI says besides what FastAPI derives: problems, headers, payloads. Each route names its own."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from coordinator.http.waiting import MAX_WAIT_S
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from protocol.messages import PartReply
from protocol.versions import OURS, PROTOCOL_HEADER, VERSION_HEADER
from protocol.wire import MEDIA_TYPE

Document = dict[str, Any]
Answers = dict[int | str, Document]  # by status

_EVERYWHERE = ("method-not-allowed", "request-timeout", "payload-too-large", "head-too-large", "internal", "not-ready")
_WITH_A_TOKEN = ("unauthorized", "protocol-mismatch", "invalid-message", "too-many-requests")
# Of everything about one run; and of everything that writes.
OF_A_RUN = ("forbidden", "not-found")
OF_A_CHANGE = ("storage-full",)
OF_AN_UPLOAD = ("length-required", "digest-mismatch", "invalid-payload", *OF_A_CHANGE)

_PAYLOAD = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}

# Those of answers, by name.
_HEADERS = {
    "X-Request-Id": "The request's own X-Request-Id, or one that was made for it.",
    VERSION_HEADER: "The coordinator's version of Outerstep.",
    PROTOCOL_HEADER: "The protocol that the coordinator speaks.",
    "WWW-Authenticate": "Bearer",
    "Retry-After": "Seconds after which asking again may help.",
    "Allow": "The methods that this address takes.",
    "ETag": "The payload digest, in quotes.",
    "Cache-Control": "private, max-age=31536000, immutable; of all that is not immutable: private, no-store.",
    "Accept-Ranges": "bytes",
    "Content-Range": "bytes FIRST-LAST/SIZE, or bytes */SIZE with 416.",
    "Preference-Applied": f"wait=SECONDS, as far as it was asked for: {MAX_WAIT_S:.0f} at most.",
}
_WITH_RETRY_AFTER = ("not-published", "worker-name-taken", "too-many-requests", "not-ready", "storage-full")
_OF_PROBLEM = {
    "unauthorized": ("WWW-Authenticate",),
    "method-not-allowed": ("Allow",),
    "range-not-satisfiable": ("Content-Range",),
    **dict.fromkeys(_WITH_RETRY_AFTER, ("Retry-After",)),
}
_OF_BLOB = ("ETag", "Cache-Control", "Accept-Ranges")

_PROBLEM_SCHEMA = {
    "title": "Problem",
    "description": "A refusal, as RFC 9457 describes it. Some have members of their own: round, share, units.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri", "enum": [PROBLEM_PREFIX + slug for slug in PROBLEMS]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


def refusing(*slugs: str, token: bool = True) -> Answers:
    """Return the `responses` of a route that answers with these problems, and with those of every route.

    `token`: whether the route needs a token.
    """
    by_status: dict[int, list[str]] = {}
    for slug in dict.fromkeys([*slugs, *(_WITH_A_TOKEN if token else ()), *_EVERYWHERE]):
        by_status.setdefault(int(PROBLEMS[slug][0]), []).append(slug)
    return {str(status): _refusal(by_status[status]) for status in sorted(by_status)}


def _refusal(slugs: Sequence[str]) -> Document:
    return {
        "description": " ".join(f"`{slug}`: {PROBLEMS[slug][1]}" for slug in slugs),
        "headers": _headers(*dict.fromkeys(name for slug in slugs for name in _OF_PROBLEM.get(slug, ()))),
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


def _headers(*names: str) -> Document:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _asked(name: str, description: str, *, required: bool = False, **schema: Any) -> Document:
    """Return the description of a request's header."""
    schema = {"type": "string", **schema}
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


def _immutable(*more: str) -> Answers:
    names = (*_OF_BLOB, *more)
    return {
        "200": {"description": "All of it.", "headers": _headers(*names), "content": _PAYLOAD},
        "206": {"description": "The range.", "headers": _headers(*names, "Content-Range"), "content": _PAYLOAD},
        "304": {"description": "These are the bytes that the client has.", "headers": _headers(*names)},
    }


# The `responses` of routes, and then their `openapi_extra`.
IMMUTABLE = _immutable()
IMMUTABLE_OR_WAITED = _immutable("Preference-Applied")
WAITED: Answers = {"200": {"headers": _headers("Preference-Applied")}}

_ASKS_FOR_BYTES = [
    _asked("If-None-Match", "The digests of what the client has."),
    _asked("Range", "bytes=FIRST-LAST; what is malformed, or of another unit, is ignored."),
    _asked("If-Range", "The digest of what the range is of; with another one all of it is answered."),
]
_ASKS_TO_WAIT = [_asked("Prefer", f"wait=SECONDS (RFC 7240): answer when there is news; {MAX_WAIT_S:.0f} s at most.")]
ASKS_FOR_BYTES: Document = {"parameters": _ASKS_FOR_BYTES}
ASKS_TO_WAIT: Document = {"parameters": _ASKS_TO_WAIT}
ASKS_FOR_BYTES_OR_WAITS: Document = {"parameters": [*_ASKS_FOR_BYTES, *_ASKS_TO_WAIT]}
PART: Answers = {"202": {"model": PartReply, "description": "The part has arrived; others are missing."}}
_ASKED_BY_ALL = [
    _asked("X-Request-Id", "The client's own id of the request."),
    _asked(PROTOCOL_HEADER, "The protocol that the client speaks; another one is refused.", enum=[OURS.protocol]),
]
_OF_ALL = ("X-Request-Id", VERSION_HEADER, PROTOCOL_HEADER)
_DIGEST = "^blake3=:[A-Za-z0-9+/]{43}=:$"
UPLOADS: Document = {
    "parameters": [
        _asked("Content-Length", "Of the body.", required=True, type="integer", minimum=1),
        _asked("Content-Digest", "Of the body.", required=True, pattern=_DIGEST),
        _asked("Content-Range", "bytes FIRST-LAST/SIZE: the body is this part of the payload."),
        _asked("Repr-Digest", "Of the payload, where the body is a part of it.", pattern=_DIGEST),
    ],
    "requestBody": {"required": True, "content": _PAYLOAD},
}


def describe(app: FastAPI) -> None:
    """Add to the application's OpenAPI schema what the routes refer to, and what holds for every request."""
    found = app.openapi

    def openapi() -> Document:
        if not app.openapi_schema:
            _complete(found())
        return found()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _complete(schema: Document) -> None:
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = _PROBLEM_SCHEMA
    components["headers"] = {
        name: {"description": description, "schema": {"type": "string"}} for name, description in _HEADERS.items()
    }
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation.setdefault("parameters", []).extend(_ASKED_BY_ALL)
            for answer in operation["responses"].values():
                answer.setdefault("headers", {}).update(_headers(*_OF_ALL))
