"""Turns every error into problem+json (RFC 9457)."""

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from protocol.errors import Problem, WireError, WireFault
from protocol.messages import Cause
from protocol.text import printable
from protocol.validation_errors import explain_all
from protocol.versions import OURS, client_version, different_builds

MAX_DISCARDED_BYTES = 64 << 20  # more than a fragment: a worker may be uploading one when its lease ends

# pydantic's errors that a client of another version can cause.
VERSION_ERRORS = frozenset({"extra_forbidden", "missing", "enum", "literal_error"})

logger = logging.getLogger(__name__)


def answer_problems(app: FastAPI) -> None:
    """Add handlers for all exceptions that routes raise on purpose; `fault_response` answers the others."""

    @app.exception_handler(Problem)
    async def _problem(_: Request, error: Problem) -> Response:
        return problem_response(error)

    @app.exception_handler(WireError)
    async def _wire(request: Request, error: WireError) -> Response:
        sides = _both_sides(request) if error.fault in (WireFault.VERSION, WireFault.HEADER) else ""
        return problem_response(Problem("invalid-payload", f"{error}{sides}"))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        # The first part of a location is "body", "path" or "query".
        faults: list[Any] = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
        sides = _both_sides(request) if any(fault["type"] in VERSION_ERRORS for fault in faults) else ""
        return problem_response(Problem("invalid-message", f"{explain_all(faults, echo=False, most=5)}{sides}"))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            return _not_allowed(request, where)
        if error.status_code == 404:
            return rejection(
                Problem("not-found", f"{where}: there is nothing at this address; see /docs"), request.headers
            )
        if error.status_code == 413:
            return problem_response(Problem("payload-too-large", f"{where}: {error.detail}"))
        return problem_response(Problem("invalid-message", f"{where}: {error.detail}"))

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, _: ClientDisconnect) -> Response:
        logger.info("%s %s: the client disconnected", request.method, printable(request.url.path))
        return Response(status_code=499)  # no client is left to read it


def _both_sides(request: Request) -> str:
    """Return both versions, for an error about a field that only one of them knows; empty if the client sends no
    version."""
    client = client_version(request.headers)
    return "" if client.software is None else f"; {different_builds(client, OURS)}"


def _not_allowed(request: Request, where: str) -> Response:
    """Return the response to a method that the address does not accept, with the methods of all routes there."""
    problem = Problem("method-not-allowed", f"{where}: this address does not accept {request.method}")
    response = rejection(problem, request.headers)
    routes = [each for each in request.app.routes if each.matches(request.scope)[0] is Match.PARTIAL]
    allowed = {method for each in routes for method in each.methods}
    response.headers["Allow"] = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
    return response


def fault_response(scope: Scope, request_id: str, error: Exception) -> Response:
    """Return the response to an unexpected exception: the disk or the database has failed, or Outerstep has a bug."""
    fault = scope["app"].state.coordinator.storage.note(error) if "app" in scope else None
    if fault is not None:
        if fault.cause is Cause.STORAGE_FULL:
            return problem_response(Problem("storage-full", fault.reason, retry_after_s=10))
        return problem_response(Problem("not-ready", fault.reason, retry_after_s=10))
    logger.error("request %s: %s %s failed", request_id, scope["method"], printable(scope["path"]), exc_info=error)
    return problem_response(Problem("internal", f"{type(error).__name__}; the log has request {request_id}"))


async def reject(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the problem as the response to a request whose body has not been read."""
    await rejection(problem, Headers(scope=scope))(scope, receive, send)


def rejection(problem: Problem, headers: Headers, *, discarded_bytes: int = MAX_DISCARDED_BYTES) -> Response:
    """Return the response to a request with these headers whose body has not been read.

    The server reads and discards the rest of the body, so that the client sees the response and can reuse the
    connection. If the body is longer than `discarded_bytes`, or of unknown length, the connection is closed instead.
    """
    response = problem_response(problem)
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdigit() or int(length) > discarded_bytes:
        response.headers["Connection"] = "close"
    return response


def problem_response(problem: Problem) -> Response:
    """Return the problem as a response."""
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(problem.retry_after_s))
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem.document(), problem.status, headers, media_type="application/problem+json")
