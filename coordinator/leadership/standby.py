"""What a standby answers by itself: its health and its metrics, because they are about this process, and the files of
the dashboard, because every coordinator has them."""

import time

from fastapi.concurrency import run_in_threadpool
from fastapi.security.utils import get_authorization_scheme_param
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coordinator.dashboard import serving
from coordinator.http.problems import problem_response, rejection
from coordinator.leadership.terms import Terms
from coordinator.store.tables import TokenRow
from coordinator.store.tokens import secret_hash
from protocol import PROTOCOL_VERSION, __version__
from protocol.errors import Problem
from protocol.messages import Health, Readiness
from protocol.messages import Scope as TokenScope

LOCAL, METRICS = ("/healthz", "/readyz"), "/metrics"
RETRY_S = 1.0
REFUSED_S = 5.0  # not ready for so long after the leader could not be reached
# Scopes whose tokens may read metrics of all runs.
_MAY_READ = (TokenScope.ADMIN, TokenScope.OPERATOR, TokenScope.WORKER, TokenScope.VIEWER)


class Standby:
    """The application for requests that it `answers`. `engine`: of the database, for tokens. `metrics`: its own."""

    def __init__(self, terms: Terms, engine: Engine, metrics: Collector) -> None:
        self._terms, self._engine = terms, engine
        self._registry = CollectorRegistry()
        self._registry.register(metrics)
        ProcessCollector(registry=self._registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] != "GET":
            where = f"{scope['method']} {scope['path']}"
            problem = Problem("method-not-allowed", f"{where}: this address does not accept {scope['method']}")
            response: Response = rejection(problem, headers)
            response.headers["Allow"] = "GET, HEAD"
        elif (page := await serving.file_at(scope["path"], headers)) is not None:
            response = await serving.response(Request(scope), page)
        elif scope["path"] == METRICS:
            response = Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        else:
            response = self._health(scope["path"])
        await response(scope, receive, send)

    def _health(self, path: str) -> Response:
        """Answer for this process. It is ready if it can forward to a leader."""
        health = Health(status="ok", version=__version__, protocol=PROTOCOL_VERSION)
        if path == "/readyz":
            if self._terms.election.fault:
                return problem_response(unready(self._terms.fault))
            if self._terms.leader is None:
                return problem_response(vacant(self._terms.fault))
            if self._terms.unreachable:
                return problem_response(unready(self._terms.unreachable))
            if time.monotonic() - self._terms.refused_at < REFUSED_S:
                return problem_response(unready("the leader cannot be reached from here"))
            health = Readiness(**{**vars(health), "status": "standby"}, last_backup_at=None)
        return JSONResponse(health.model_dump(mode="json"))

    async def answers(self, scope: Scope) -> bool:
        """Return True if this process answers the request. The leader answers tokens for one run, because it has that
        run's metrics, unknown tokens, and requests for files that do not exist."""
        headers = Headers(scope=scope)
        if scope["path"] == METRICS:
            return await run_in_threadpool(self._may_read, headers)
        return scope["path"] in LOCAL or await serving.file_at(scope["path"], headers) is not None

    def _may_read(self, headers: Headers) -> bool:
        _, secret = get_authorization_scheme_param(headers.get("authorization"))
        row = TokenRow
        query = select(row.scope, row.run, row.expires_at).where(row.secret_hash == secret_hash(secret))
        try:
            with self._engine.connect() as connection:
                found = connection.execute(query).first()
        except SQLAlchemyError:
            return False
        if found is None or found.scope not in _MAY_READ or found.run is not None:
            return False
        return found.expires_at is None or found.expires_at > self._terms.election.now()


def vacant(why: str = "") -> Problem:
    """Return the answer while nobody leads."""
    reason = f": {why}" if why else ""
    return unready(f"no coordinator leads at the moment{reason}")


def unready(detail: str) -> Problem:
    return Problem("not-ready", detail, retry_after_s=RETRY_S)
