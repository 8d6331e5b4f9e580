"""Events: JSON pages, or a live stream of server-sent events."""

import logging
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from coordinator.http.access import Caller, Items, ReadableRun, Service, charge
from coordinator.http.bodies import LimitedRoute
from coordinator.http.middleware import is_head
from coordinator.http.openapi import RUN_PROBLEMS, Responses, problem_responses
from coordinator.http.response_cache import Caches, cached_response, on_read_thread
from coordinator.quotas import lineage_of
from coordinator.reporting import run_reports
from coordinator.run.live_run import LiveRun
from coordinator.run.waiters import EVENTS
from coordinator.service import Coordinator
from protocol.errors import Problem
from protocol.messages import Event, Page

router = APIRouter(prefix="/v1/runs/{run}/events", tags=["events"], route_class=LimitedRoute)

logger = logging.getLogger(__name__)

STREAM_PAGE = 100
_STREAM: Responses = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.get("", response_model=Page[Event], responses=_STREAM | problem_responses(*RUN_PROBLEMS))
async def get_events(
    http: Request,
    run: ReadableRun,
    service: Service,
    caller: Caller,
    limit: Items,
    after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    last_event_id: Annotated[int, Header(ge=0, lt=1 << 63)] = 0,
) -> Any:
    """List the run's events, oldest first. With `Accept: text/event-stream`: stream them from `Last-Event-ID` on."""
    if "text/event-stream" in http.headers.get("accept", ""):
        charge(http, 1)
        check_still = partial(service.check_still, caller)
        headers = {"Cache-Control": "private, no-store"}  # replaces the library's value
        if is_head(http.scope):  # a stream would not end
            return Response(headers=headers, media_type="text/event-stream")
        events = _stream(run, service, http.app.state.caches, max(after, last_event_id), check_still)
        return _CountedStream(events, headers=headers)
    return await cached_response(http, run_reports.events, run, limit, after)


class _CountedStream(EventSourceResponse):
    """A stream that counts towards its caller's quota. Raises Problem `too-many-requests` above the quota."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service: Coordinator = scope["app"].state.coordinator
        with service.quotas.stream(lineage_of(scope["state"]["identity"])):
            await super().__call__(scope, receive, send)


async def _stream(
    run: LiveRun, service: Coordinator, caches: Caches, after: int, check_still: Callable[[], None]
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events after `after`. Ends when `check_still` raises Problem because the token is no longer valid."""
    waiters = service.waiters
    while not waiters.closed:
        with waiters.register(run.name, EVENTS) as woken:
            try:
                check_still()
            except Problem as problem:
                logger.info("%s: a stream of events ended: %s", run.name, problem.detail)
                return
            # Streams that were woken together share one read.
            key = (run, after, waiters.wake_count(run.name))
            report = partial(run_reports.events, run, STREAM_PAGE, after)
            page, _ = await caches.events.read(key, math.inf, partial(on_read_thread, service, report))
            for event in page.items:
                yield ServerSentEvent(id=str(event.id), event=event.kind, data=event.model_dump_json())
                after = event.id
            if not page.items:
                await woken.wait()
