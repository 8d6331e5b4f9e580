"""Metrics: what Prometheus scrapes."""

from functools import partial

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.http.access import Caller, Service, charge
from coordinator.http.describing import Answers, refusing
from coordinator.http.limits import LimitedRoute
from coordinator.metrics.runs import shown
from coordinator.metrics.server import Meter
from protocol.messages import Scope

router = APIRouter(tags=["metrics"], route_class=LimitedRoute)

MAX_AGE_S = 1.0  # of what others than an admin get
_TEXT: Answers = {"200": {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/metrics", response_class=PlainTextResponse, responses=_TEXT | refusing("not-found"))
async def get_metrics(http: Request, service: Service, caller: Caller) -> Response:
    """The metrics, as Prometheus' text: of all runs and of the server; of its run alone, where the token is for one."""
    run = None if caller.run is None else service.run(caller.run)
    charge(http, len(shown(service.runs())) if run is None else 1)
    meter: Meter = http.app.state.meter
    make = partial(anyio.to_thread.run_sync, meter.exposition, run, limiter=service.reading)
    if caller.allows(Scope.ADMIN):
        text = await make()
    else:
        text, _ = await service.metrics.read(run, MAX_AGE_S, make)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)
