"""OpenAPI: the parts that FastAPI does not derive from the routes (problems, request headers, payloads), and the page
that shows the schema, /docs. Each route names the problems and headers that apply to it."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute, Mount, Route

from coordinator.http.long_polls import MAX_WAIT_S
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from protocol.messages import PartReply
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
    return {
        str(status): {
            "description": " ".join(f"`{slug}`: {PROBLEMS[slug][1]}" for slug in by_status[status]),
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(by_status)
    }


def _request_header(name: str, description: str, *, required: bool = False, **schema: Any) -> Document:
    """Return a request header's description."""
    schema = {"type": "string", **schema}
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


# For `responses` of a route.
_PAYLOAD = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
BLOB_RESPONSES: Responses = {
    "200": {"description": "The whole payload.", "content": _PAYLOAD},
    "206": {"description": "The range.", "content": _PAYLOAD},
    "304": {"description": "The client has these bytes."},
    "307": {"description": "If direct=true: where the store has the payload, for a few minutes."},
}
PART_RESPONSE: Responses = {"202": {"model": PartReply, "description": "The part has arrived; others are missing."}}

_RANGE_HEADERS = [
    _request_header("If-None-Match", "The digests of the payloads that the client has."),
    _request_header("Range", "bytes=FIRST-LAST or bytes=FIRST-; anything else is ignored."),
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


def extend_schema(app: FastAPI) -> None:
    """Add the problem that routes refer to to the application's OpenAPI schema."""
    found = app.openapi

    def openapi() -> Document:
        schema = found()
        schema["components"]["schemas"]["Problem"] = _PROBLEM_SCHEMA
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


# --- the page ---------------------------------------------------------------------------------------------------------


def page_routes(app: FastAPI) -> list[BaseRoute]:
    """Return the routes of /docs, and of its scripts and styles, which are part of the coordinator. It may connect only
    to this server, and runs no inline scripts except its own."""

    async def docs(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        page = get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=app.title,
            swagger_js_url=f"{root}{_STATIC}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{_STATIC}/swagger-ui.css",
            swagger_favicon_url=f"{root}{_STATIC}/favicon.png",
        )
        digests = [hashlib.sha256(script).digest() for script in _INLINE_SCRIPT.findall(bytes(page.body))]
        own = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        page.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'self' {own}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        page.headers["Referrer-Policy"] = "no-referrer"
        return page

    return [
        Route("/docs", docs),
        Mount(_STATIC, StaticFiles(directory=Path(fastapi_offline.__file__).parent / "static")),
    ]
