"""OpenAPI: the parts that FastAPI does not derive from the routes (problems, headers, payloads), and the pages that
show the schema, /docs and /redoc. Each route names the problems and headers that apply to it."""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute, Mount, Route

from coordinator.http.long_polls import MAX_WAIT_S
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from protocol.messages import PartReply
from protocol.versions import LENGTH_HEADER, OURS, PROTOCOL_HEADER, VERSION_HEADER
from protocol.wire import MEDIA_TYPE

_STATIC = "/static-offline-docs"
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)

Document = dict[str, Any]
Responses = dict[int | str, Document]  # by status

_EVERYWHERE = (
    "method-not-allowed",
    "request-timeout",
    "payload-too-large",
    "head-too-large",
    "invalid-request",
    "internal",
    "not-ready",
)
_WITH_A_TOKEN = ("unauthorized", "protocol-mismatch", "invalid-message", "too-many-requests")
RUN_PROBLEMS = ("forbidden", "not-found")  # for every route below /v1/runs/{run}
WRITE_PROBLEMS = ("storage-full", "superseded")
UPLOAD_PROBLEMS = ("length-required", "digest-mismatch", "invalid-payload", *WRITE_PROBLEMS)

_PAYLOAD = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}

_RESPONSE_HEADERS = {
    "X-Request-Id": "The request's own X-Request-Id, or a new one.",
    VERSION_HEADER: "The coordinator's version of Outerstep.",
    PROTOCOL_HEADER: "The protocol that the coordinator speaks.",
    "WWW-Authenticate": "Bearer",
    "Retry-After": "Seconds after which a retry may succeed.",
    "Allow": "The methods that this address accepts.",
    "ETag": "The payload digest, in quotes.",
    "Cache-Control": "private, max-age=31536000, immutable; for anything that is not immutable: private, no-store.",
    "Accept-Ranges": "bytes",
    "Location": "The address at the store.",
    LENGTH_HEADER: "The length of the payload at Location, in bytes.",
    "Content-Range": "bytes FIRST-LAST/SIZE, or bytes */SIZE with 416.",
    "Preference-Applied": f"wait=SECONDS, the wait that was granted: at most {MAX_WAIT_S:.0f}.",
}
_WITH_RETRY_AFTER = (
    "not-published",
    "worker-name-taken",
    "too-many-requests",
    "not-ready",
    "storage-full",
    "superseded",
)
_PROBLEM_HEADERS = {
    "unauthorized": ("WWW-Authenticate",),
    "method-not-allowed": ("Allow",),
    "range-not-satisfiable": ("Content-Range",),
    **dict.fromkeys(_WITH_RETRY_AFTER, ("Retry-After",)),
}
_BLOB_HEADERS = ("ETag", "Cache-Control", "Accept-Ranges")

_PROBLEM_SCHEMA = {
    "title": "Problem",
    "description": "An error response (RFC 9457). Some problems have additional members: round, share, units.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri", "enum": [PROBLEM_PREFIX + slug for slug in PROBLEMS]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


def problem_responses(*slugs: str, token: bool = True) -> Responses:
    """Return the `responses` of a route that can answer with these problems, and with those that every route has.

    `token`: whether the route needs a token.
    """
    by_status: dict[int, list[str]] = {}
    for slug in dict.fromkeys([*slugs, *(_WITH_A_TOKEN if token else ()), *_EVERYWHERE]):
        by_status.setdefault(int(PROBLEMS[slug][0]), []).append(slug)
    return {str(status): _problem_response(by_status[status]) for status in sorted(by_status)}


def _problem_response(slugs: Sequence[str]) -> Document:
    return {
        "description": " ".join(f"`{slug}`: {PROBLEMS[slug][1]}" for slug in slugs),
        "headers": _headers(*dict.fromkeys(name for slug in slugs for name in _PROBLEM_HEADERS.get(slug, ()))),
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


def _headers(*names: str) -> Document:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _request_header(name: str, description: str, *, required: bool = False, **schema: Any) -> Document:
    """Return a request header's description."""
    schema = {"type": "string", **schema}
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


def _blob_responses(*more: str) -> Responses:
    names = (*_BLOB_HEADERS, *more)
    return {
        "200": {"description": "The whole payload.", "headers": _headers(*names), "content": _PAYLOAD},
        "206": {"description": "The range.", "headers": _headers(*names, "Content-Range"), "content": _PAYLOAD},
        "304": {"description": "The client has these bytes.", "headers": _headers(*names)},
        "307": {
            "description": "If direct=true: where the store has the payload, for a few minutes.",
            "headers": _headers("ETag", "Location", LENGTH_HEADER),
        },
    }


# For `responses` of a route.
BLOB_RESPONSES = _blob_responses()
BLOB_OR_WAIT_RESPONSES = _blob_responses("Preference-Applied")
WAIT_RESPONSE: Responses = {"200": {"headers": _headers("Preference-Applied")}}

PART_RESPONSE: Responses = {"202": {"model": PartReply, "description": "The part has arrived; others are missing."}}

_RANGE_HEADERS = [
    _request_header("If-None-Match", "The digests of the payloads that the client has."),
    _request_header("Range", "bytes=FIRST-LAST; a malformed range, or another unit, is ignored."),
    _request_header(
        "If-Range", "The digest of the payload that the range belongs to; if it differs, the response is whole."
    ),
]
_WAIT_HEADERS = [
    _request_header("Prefer", f"wait=SECONDS (RFC 7240): answer when there is news; {MAX_WAIT_S:.0f} s at most.")
]
_DIGEST = "^blake3=:[A-Za-z0-9+/]{43}=:$"

# For `openapi_extra` of a route.
RANGE_PARAMETERS: Document = {"parameters": _RANGE_HEADERS}
WAIT_PARAMETERS: Document = {"parameters": _WAIT_HEADERS}
RANGE_AND_WAIT_PARAMETERS: Document = {"parameters": [*_RANGE_HEADERS, *_WAIT_HEADERS]}
UPLOAD_PARAMETERS: Document = {
    "parameters": [
        _request_header("Content-Length", "Of the body.", required=True, type="integer", minimum=1),
        _request_header("Content-Digest", "Of the body.", required=True, pattern=_DIGEST),
        _request_header("Content-Range", "bytes FIRST-LAST/SIZE: the body is this part of the payload."),
        _request_header("Repr-Digest", "Of the whole payload, if the body is a part of it.", pattern=_DIGEST),
    ],
    "requestBody": {"required": True, "content": _PAYLOAD},
}

# These apply to every request and every response.
_COMMON_PARAMETERS = [
    _request_header("X-Request-Id", "The client's own id of the request."),
    _request_header(
        PROTOCOL_HEADER, "The protocol that the client speaks; another one is rejected.", enum=[OURS.protocol]
    ),
]
_COMMON_HEADERS = ("X-Request-Id", VERSION_HEADER, PROTOCOL_HEADER)


def extend_schema(app: FastAPI) -> None:
    """Add to the application's OpenAPI schema the components that routes refer to, and the parts common to all
    requests."""
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
        name: {"description": description, "schema": {"type": "string"}}
        for name, description in _RESPONSE_HEADERS.items()
    }
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation.setdefault("parameters", []).extend(_COMMON_PARAMETERS)
            for answer in operation["responses"].values():
                answer.setdefault("headers", {}).update(_headers(*_COMMON_HEADERS))


# --- the pages --------------------------------------------------------------------------------------------------------


def page_routes(app: FastAPI) -> list[BaseRoute]:
    """Return the routes of /docs and /redoc, and of their scripts and styles, which are part of the coordinator."""

    def page(path: str, name: str, html: Callable[..., HTMLResponse], **files: str) -> Route:
        async def answer(request: Request) -> HTMLResponse:
            root = request.scope.get("root_path", "")
            urls = {key: f"{root}{_STATIC}/{file}" for key, file in files.items()}
            return _restricted(html(openapi_url=f"{root}{app.openapi_url}", title=f"{app.title}: {name}", **urls))

        return Route(path, answer)

    swagger = {"swagger_js_url": "swagger-ui-bundle.js", "swagger_css_url": "swagger-ui.css"}
    redoc = partial(get_redoc_html, with_google_fonts=False)
    return [
        page("/docs", "Swagger UI", get_swagger_ui_html, **swagger, swagger_favicon_url="favicon.png"),
        page("/redoc", "ReDoc", redoc, redoc_js_url="redoc.standalone.js", redoc_favicon_url="favicon.png"),
        Mount(_STATIC, StaticFiles(directory=Path(fastapi_offline.__file__).parent / "static")),
    ]


def _restricted(page: HTMLResponse) -> HTMLResponse:
    """Return the page with a Content-Security-Policy: it may connect only to this server, and run no inline scripts
    except its own."""
    digests = [hashlib.sha256(script).digest() for script in _INLINE_SCRIPT.findall(bytes(page.body))]
    own = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = [
        "default-src 'none'",
        f"script-src 'self' {own}".rstrip(),
        "style-src 'self' 'unsafe-inline'",  # both libraries create style elements
        "img-src 'self' data:",
        "connect-src 'self'",
        "worker-src blob:",  # ReDoc's search
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    page.headers["Content-Security-Policy"] = "; ".join(policy)
    page.headers["Referrer-Policy"] = "no-referrer"
    return page
