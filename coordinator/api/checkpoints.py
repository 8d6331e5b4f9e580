"""Checkpoints: upload state 0, list checkpoints, download their bytes."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator.http.access import AnyMember, Detail, Items, Number, ReadableRun, Service, layout_with
from coordinator.http.bodies import LimitedRoute, max_body
from coordinator.http.downloads import Direct, blob_response, direct_response
from coordinator.http.openapi import (
    BLOB_RESPONSES,
    PART_RESPONSE,
    RANGE_PARAMETERS,
    RUN_PROBLEMS,
    UPLOAD_PARAMETERS,
    UPLOAD_PROBLEMS,
    Responses,
    problem_responses,
)
from coordinator.http.response_cache import cached_response
from coordinator.http.uploads import ReceivedUpload, part_response, receive_upload
from coordinator.reporting import run_reports
from coordinator.rounds import leases
from coordinator.run.live_run import LiveRun
from coordinator.sync import state_0
from protocol.fragments import Layout
from protocol.messages import CheckpointDetail, CheckpointFragment, CheckpointInfo, Page, PartReply
from protocol.wire import max_payload_bytes, max_payloads_bytes

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["checkpoints"], route_class=LimitedRoute)

_REPEATED: Responses = {
    "200": {"model": CheckpointFragment, "description": "It was already accepted."},
    **PART_RESPONSE,
}


@router.put(
    "/0/fragments/{fragment}",
    status_code=201,
    response_model=CheckpointFragment,
    responses=_REPEATED | problem_responses(*RUN_PROBLEMS, *UPLOAD_PROBLEMS, "state-conflict", "pin-mismatch"),
    openapi_extra=UPLOAD_PARAMETERS,
)
@max_body(None)
async def seed(
    http: Request, response: Response, run: ReadableRun, fragment: Number, worker: AnyMember, service: Service
) -> CheckpointFragment | Response:
    """Upload a fragment of state 0, whole or in parts."""
    layout = layout_with(run, fragment)
    limit = max_payload_bytes("fp32", 2 * layout.elements[fragment])
    all_bytes = max_payloads_bytes("fp32", len(layout.fragments), 2 * layout.total_elements)
    async with receive_upload(http, service, limit, all_bytes) as upload:
        reply, created = await run_in_threadpool(_accept, run, layout, worker, fragment, upload)
    if isinstance(reply, PartReply):
        return part_response(reply)
    if not created:
        response.status_code = 200
    return reply


def _accept(
    run: LiveRun, layout: Layout, worker: str, fragment: int, upload: ReceivedUpload
) -> tuple[CheckpointFragment | PartReply, bool]:
    leases.check_lease(run, worker)  # the lease may have ended while the body arrived
    found = upload.complete()
    if isinstance(found, PartReply):
        return found, False
    return state_0.accept_state(run, layout, worker, fragment, found)


@router.get("", response_model=Page[CheckpointInfo], responses=problem_responses(*RUN_PROBLEMS))
async def list_checkpoints(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None
) -> Response:
    """List the checkpoints, newest first."""
    return await cached_response(http, run_reports.checkpoints, run, limit, after)


@router.get(
    "/{number}", response_model=CheckpointDetail, responses=problem_responses(*RUN_PROBLEMS, "gone", "file-lost")
)
async def get_checkpoint(
    http: Request, run: ReadableRun, _: Detail, number: Annotated[str, Path(pattern=r"^(latest|\d{1,18})$")]
) -> Response:
    """Show a checkpoint: layout, fragments, digests."""
    return await cached_response(http, run_reports.checkpoint_detail, run, None if number == "latest" else int(number))


@router.get(
    "/{number}/fragments/{fragment}",
    response_class=Response,
    responses=BLOB_RESPONSES | problem_responses(*RUN_PROBLEMS, "gone", "file-lost", "range-not-satisfiable"),
    openapi_extra=RANGE_PARAMETERS,
)
def get_checkpoint_fragment(
    http: Request, run: ReadableRun, number: Number, fragment: Number, direct: Direct = False
) -> Response:
    """Download a fragment's outer state: θ, then u."""
    layout_with(run, fragment)
    stored = run_reports.stored_checkpoint(run, number, fragment)
    if direct and (redirect := direct_response(http, run.blobs, stored)) is not None:
        return redirect
    return blob_response(http, run.blobs, stored, partial(run_reports.missing_checkpoint, run, number, fragment))
