"""Checkpoints: seed the first, list them, fetch their bytes."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator import reports
from coordinator.http.access import AnyMember, Detail, Items, Number, ReadableRun, Service, layout_with
from coordinator.http.describing import (
    ASKS_FOR_BYTES,
    IMMUTABLE,
    OF_A_RUN,
    OF_AN_UPLOAD,
    PART,
    UPLOADS,
    Answers,
    refusing,
)
from coordinator.http.limits import LimitedRoute, takes_up_to
from coordinator.http.receiving import Received, part_taken, received
from coordinator.http.sending import blob
from coordinator.http.telling import told
from coordinator.run.live_run import LiveRun
from coordinator.sync import seeding
from coordinator.workers import leases
from protocol.fragments import Layout
from protocol.messages import CheckpointDetail, CheckpointFragment, CheckpointInfo, Page, PartReply
from protocol.wire import max_payload_bytes, max_payloads_bytes

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["checkpoints"], route_class=LimitedRoute)

_SAME_AGAIN: Answers = {"200": {"model": CheckpointFragment, "description": "It was accepted before."}, **PART}


@router.put(
    "/0/fragments/{fragment}",
    status_code=201,
    response_model=CheckpointFragment,
    responses=_SAME_AGAIN | refusing(*OF_A_RUN, *OF_AN_UPLOAD, "state-conflict", "pin-mismatch"),
    openapi_extra=UPLOADS,
)
@takes_up_to(None)
async def seed(
    http: Request, response: Response, run: ReadableRun, fragment: Number, worker: AnyMember, service: Service
) -> CheckpointFragment | Response:
    """Upload a fragment of state 0, whole or in parts."""
    layout = layout_with(run, fragment)
    limit = max_payload_bytes("fp32", 2 * layout.elements[fragment])
    all_bytes = max_payloads_bytes("fp32", len(layout.fragments), 2 * layout.total_elements)
    async with received(http, service, limit, all_bytes) as arrived:
        reply, created = await run_in_threadpool(_accept, run, layout, worker, fragment, arrived)
    if isinstance(reply, PartReply):
        return part_taken(reply)
    if not created:
        response.status_code = 200
    return reply


def _accept(
    run: LiveRun, layout: Layout, worker: str, fragment: int, arrived: Received
) -> tuple[CheckpointFragment | PartReply, bool]:
    leases.check_lease(run, worker)  # it may have ended, or been ended, while the body came
    found = arrived.complete()
    if isinstance(found, PartReply):
        return found, False
    return seeding.accept_state(run, layout, worker, fragment, found)


@router.get("", response_model=Page[CheckpointInfo], responses=refusing(*OF_A_RUN))
async def list_checkpoints(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None
) -> Response:
    """The checkpoints, newest first."""
    return await told(http, reports.checkpoints, run, limit, after)


@router.get("/{number}", response_model=CheckpointDetail, responses=refusing(*OF_A_RUN, "gone", "file-lost"))
async def get_checkpoint(
    http: Request, run: ReadableRun, _: Detail, number: Annotated[str, Path(pattern=r"^(latest|\d{1,18})$")]
) -> Response:
    """One checkpoint: layout, fragments, digests."""
    return await told(http, reports.checkpoint_detail, run, None if number == "latest" else int(number))


@router.get(
    "/{number}/fragments/{fragment}",
    response_class=Response,
    responses=IMMUTABLE | refusing(*OF_A_RUN, "gone", "file-lost", "range-not-satisfiable"),
    openapi_extra=ASKS_FOR_BYTES,
)
def get_checkpoint_fragment(http: Request, run: ReadableRun, number: Number, fragment: Number) -> Response:
    """One fragment's outer state, θ then u."""
    layout_with(run, fragment)
    stored = reports.stored_checkpoint(run, number, fragment)
    return blob(http, run.blobs, stored, partial(reports.missing_checkpoint, run, number, fragment))
