"""Events: JSON pages, or a live stream of server-sent events."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from sse_starlette import EventSourceResponse, ServerSentEvent

from coordinator import reports
from coordinator.http.access import Limit, ReadableRun, Service
from coordinator.http.describing import OF_A_RUN, Answers, refusing
from coordinator.http.limits import LimitedRoute
from coordinator.runs.bell import EVENTS, Bell
from coordinator.runs.live_run import LiveRun
from protocol.messages import Event, Page

router = APIRouter(prefix="/v1/runs/{run}/events", tags=["events"], route_class=LimitedRoute)

STREAM_PAGE = 100
_STREAM: Answers = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.get("", response_model=Page[Event], responses=_STREAM | refusing(*OF_A_RUN))
async def get_events(
    http: Request,
    run: ReadableRun,
    service: Service,
    limit: Limit = 100,
    after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    last_event_id: Annotated[int, Header(ge=0, lt=1 << 63)] = 0,
) -> Any:
    """What happened, oldest first. With `Accept: text/event-stream`: from `Last-Event-ID` on, and on as it happens."""
    if "text/event-stream" in http.headers.get("accept", ""):
        return EventSourceResponse(_stream(run, service.bell, max(after, last_event_id)))
    return await run_in_threadpool(reports.events, run, limit, after)


async def _stream(run: LiveRun, bell: Bell, after: int) -> AsyncIterator[ServerSentEvent]:
    while not bell.closed:
        with bell.listening(run.name, EVENTS) as ring:
            page = await run_in_threadpool(reports.events, run, STREAM_PAGE, after)
            for event in page.items:
                yield ServerSentEvent(id=str(event.id), event=event.kind, data=event.model_dump_json())
                after = event.id
            if not page.items:
                await ring.wait()
