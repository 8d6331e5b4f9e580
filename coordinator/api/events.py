"""Events: JSON pages, or a live stream of server-sent events."""

import logging
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from coordinator import reports
from coordinator.callers import lineage_of
from coordinator.http.access import Caller, Items, ReadableRun, Service, charge
from coordinator.http.describing import OF_A_RUN, Answers, refusing
from coordinator.http.limits import LimitedRoute
from coordinator.http.telling import read, told
from coordinator.run.live_run import LiveRun
from coordinator.run.waiters import EVENTS
from coordinator.service import Coordinator
from protocol.errors import Problem
from protocol.messages import Event, Page

router = APIRouter(prefix="/v1/runs/{run}/events", tags=["events"], route_class=LimitedRoute)

logger = logging.getLogger(__name__)

STREAM_PAGE = 100
_STREAM: Answers = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.get("", response_model=Page[Event], responses=_STREAM | refusing(*OF_A_RUN))
async def get_events(
    http: Request,
    run: ReadableRun,
    service: Service,
    caller: Caller,
    limit: Items,
    after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    last_event_id: Annotated[int, Header(ge=0, lt=1 << 63)] = 0,
) -> Any:
    """What happened, oldest first. With `Accept: text/event-stream`: from `Last-Event-ID` on, and on as it happens."""
    if "text/event-stream" in http.headers.get("accept", ""):
        charge(http, 1)
        check_still = partial(service.check_still, caller)
        headers = {"Cache-Control": "private, no-store"}  # else the library's own
        return _Counted(_stream(run, service, max(after, last_event_id), check_still), headers=headers)
    return await told(http, reports.events, run, limit, after)


class _Counted(EventSourceResponse):
    """A stream that is counted among its caller's while it lasts. Problem `too-many-requests` where it has too many."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service: Coordinator = scope["app"].state.coordinator
        with service.callers.stream(lineage_of(scope["state"]["identity"])):
            await super().__call__(scope, receive, send)


async def _stream(
    run: LiveRun, service: Coordinator, after: int, check_still: Callable[[], None]
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events from `after` on, until `check_still` raises Problem: the token is good no more."""
    waiters = service.waiters
    while not waiters.closed:
        with waiters.register(run.name, EVENTS) as woken:
            try:
                check_still()
            except Problem as problem:
                logger.info("%s: a stream of events ended: %s", run.name, problem.detail)
                return
            # Those who were woken together read together.
            key = (run, after, waiters.wake_count(run.name))
            page, _ = await service.event_pages.read(
                key, math.inf, partial(read, service, partial(reports.events, run, STREAM_PAGE, after))
            )
            for event in page.items:
                yield ServerSentEvent(id=str(event.id), event=event.kind, data=event.model_dump_json())
                after = event.id
            if not page.items:
                await woken.wait()
