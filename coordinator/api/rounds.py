"""Rounds: list and inspect them, contribute to them, download their deltas."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator.http.access import (
    AnyMember,
    Caller,
    Detail,
    Items,
    MemberRun,
    Number,
    PathName,
    ReadableRun,
    Service,
    layout_with,
)
from coordinator.http.bodies import MESSAGE_BYTES, LimitedRoute, max_body
from coordinator.http.downloads import Direct, blob_response, direct_response, is_sent_by_standby, memory_response
from coordinator.http.long_polls import poll, preferred_wait_s
from coordinator.http.openapi import (
    BLOB_RESPONSES,
    PART_RESPONSE,
    RANGE_AND_WAIT_PARAMETERS,
    RANGE_PARAMETERS,
    RUN_PROBLEMS,
    UPLOAD_PARAMETERS,
    UPLOAD_PROBLEMS,
    WRITE_PROBLEMS,
    Responses,
    problem_responses,
)
from coordinator.http.response_cache import cached_response
from coordinator.http.uploads import ReceivedUpload, part_response, receive_upload
from coordinator.reporting import round_reports, run_reports
from coordinator.rounds import leases
from coordinator.run.live_run import LiveRun
from coordinator.run.waiters import delta_of
from coordinator.sync import contributing, deltas, differences, direct_uploads
from coordinator.trust import evaluating
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import (
    DIRECT_HEADER_BYTES,
    MAX_WITHOUT,
    ContributionReply,
    DirectUpload,
    EvaluationReply,
    EvaluationReport,
    Page,
    PartReply,
    RoundDetail,
    RoundInfo,
    UploadGrant,
    WithoutReport,
)
from protocol.wire import max_payload_bytes, max_payloads_bytes

router = APIRouter(prefix="/v1/runs/{run}/rounds", tags=["rounds"], route_class=LimitedRoute)

_CONTRIBUTION_PROBLEMS = (
    "round-closed",
    "round-not-open",
    "run-ended",
    "contribution-conflict",
    "stale-base",
    "units-not-held",
    "not-ready",
)
_DELTA_PROBLEMS = ("not-published", "run-ended", "round-not-open", "contribution-lost", "gone", "range-not-satisfiable")
_DIRECT_PROBLEMS = ("invalid-payload", "digest-mismatch", "payload-too-large", "too-many-requests")
_DIRECT_BYTES = 2 * DIRECT_HEADER_BYTES
_WITHOUT_BYTES = 128 * MAX_WITHOUT  # a name and a number for each worker
_COMMITTED: Responses = {"200": {"model": ContributionReply, "description": "It was already accepted."}}
_REPEATED: Responses = {"200": {"model": ContributionReply, "description": "It was already accepted."}, **PART_RESPONSE}


@router.get("", response_model=Page[RoundInfo], responses=problem_responses(*RUN_PROBLEMS))
async def list_rounds(
    http: Request,
    run: ReadableRun,
    limit: Items,
    after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None,
) -> Response:
    """List the rounds, newest first."""
    return await cached_response(http, round_reports.rounds, run, limit, after)


@router.get("/{number}", response_model=RoundDetail, responses=problem_responses(*RUN_PROBLEMS))
async def get_round(
    http: Request,
    run: ReadableRun,
    _: Detail,
    number: Annotated[str, Path(pattern=r"^(current|\d{1,18})$")],
) -> Response:
    """Show a round and its fragments; `current` is the open round, or the next one if none is open."""
    return await cached_response(http, round_reports.round_detail, run, None if number == "current" else int(number))


Redone = Annotated[int, Query(ge=0, lt=1 << 63)]


@router.put(
    "/{number}/evaluation",
    responses=problem_responses(*RUN_PROBLEMS, "round-not-open", "not-asked", *WRITE_PROBLEMS),
)
@max_body(MESSAGE_BYTES)
def report_evaluation(
    run: ReadableRun, number: Number, report: EvaluationReport, worker: AnyMember, redone: Redone = 0
) -> EvaluationReply:
    """Report the held-out loss of the state before round `number`. `redone`: as in the assignment that asked for it.
    The answer may ask for more measurements."""
    return evaluating.record_evaluation(run, worker, number, redone, report)


@router.put(
    "/{number}/evaluation/without",
    status_code=204,
    responses=problem_responses(*RUN_PROBLEMS, "not-asked", *WRITE_PROBLEMS),
)
@max_body(_WITHOUT_BYTES)
def report_without(
    run: ReadableRun, number: Number, report: WithoutReport, worker: AnyMember, redone: Redone = 0
) -> Response:
    """Report the held-out losses of the state before round `number` without one contribution each. `redone`: as in the
    assignment that asked for the evaluation."""
    evaluating.record_without(run, worker, number, redone, report)
    return Response(status_code=204)


@router.get(
    "/{number}/fragments/{fragment}/without/{worker}",
    response_class=Response,
    responses=BLOB_RESPONSES | problem_responses(*RUN_PROBLEMS, "not-asked", "gone", "range-not-satisfiable"),
    openapi_extra=RANGE_PARAMETERS,
)
def get_difference(
    http: Request, run: ReadableRun, number: Number, fragment: Number, worker: PathName, evaluator: AnyMember
) -> Response:
    """Download the fragment's mean without this worker's contribution minus the mean of all."""
    layout_with(run, fragment)
    digest, content = differences.difference(run, number, fragment, worker, evaluator)
    return memory_response(http, content, digest)


@router.put(
    "/{number}/fragments/{fragment}/contributions/{worker}",
    status_code=201,
    response_model=ContributionReply,
    responses=_REPEATED | problem_responses(*RUN_PROBLEMS, *UPLOAD_PROBLEMS, *_CONTRIBUTION_PROBLEMS),
    openapi_extra=UPLOAD_PARAMETERS,
)
@max_body(None)
async def contribute(
    http: Request,
    response: Response,
    run: MemberRun,
    number: Number,
    fragment: Number,
    worker: PathName,
    service: Service,
) -> ContributionReply | Response:
    """Upload a contribution, whole or in parts. Repeating it answers 200."""
    layout = layout_with(run, fragment)
    limit = max_payload_bytes(run.spec.sync.upload_codec, layout.elements[fragment])
    round_bytes = max_payloads_bytes(run.spec.sync.upload_codec, len(layout.fragments), layout.total_elements)
    async with receive_upload(http, service, limit, round_bytes, len(run.members)) as upload:
        reply = await run_in_threadpool(_accept, run, layout, worker, number, fragment, upload)
    if isinstance(reply, PartReply):
        return part_response(reply)
    if not reply.created:
        response.status_code = 200
    return reply


def _accept(
    run: LiveRun, layout: Layout, worker: str, number: int, fragment: int, upload: ReceivedUpload
) -> ContributionReply | PartReply:
    leases.check_lease(run, worker)  # the lease may have ended while the body arrived
    found = upload.complete()
    if isinstance(found, PartReply):
        assert upload.part is not None
        accepted = contributing.accept_part(run, worker, number, fragment, upload.part.digest)
        upload.finished = accepted is not None
        return accepted or found
    return contributing.accept(run, layout, worker, number, fragment, found)


@router.post(
    "/{number}/fragments/{fragment}/contributions/{worker}/grant",
    response_model=UploadGrant,
    responses=problem_responses(*RUN_PROBLEMS, *_DIRECT_PROBLEMS, *_CONTRIBUTION_PROBLEMS, *WRITE_PROBLEMS),
)
@max_body(_DIRECT_BYTES)
def grant_upload(
    run: MemberRun, number: Number, fragment: Number, worker: PathName, upload: DirectUpload
) -> UploadGrant:
    """Announce a contribution, and get the address to upload it to the store of the coordinator."""
    leases.check_lease(run, worker)
    return direct_uploads.grant(run, layout_with(run, fragment), worker, number, fragment, upload)


@router.post(
    "/{number}/fragments/{fragment}/contributions/{worker}/commit",
    status_code=201,
    response_model=ContributionReply,
    responses=_COMMITTED
    | problem_responses(*RUN_PROBLEMS, *_DIRECT_PROBLEMS, "not-uploaded", *_CONTRIBUTION_PROBLEMS, *WRITE_PROBLEMS),
)
@max_body(_DIRECT_BYTES)
def commit_upload(
    response: Response, run: MemberRun, number: Number, fragment: Number, worker: PathName, upload: DirectUpload
) -> ContributionReply:
    """Commit a contribution that was uploaded to the store, with the same announcement. Repeating it answers 200."""
    leases.check_lease(run, worker)
    reply = direct_uploads.commit(run, layout_with(run, fragment), worker, number, fragment, upload)
    if not reply.created:
        response.status_code = 200
    return reply


@router.get(
    "/{number}/fragments/{fragment}/delta",
    response_class=Response,
    responses=BLOB_RESPONSES | problem_responses(*RUN_PROBLEMS, *_DELTA_PROBLEMS),
    openapi_extra=RANGE_AND_WAIT_PARAMETERS,
)
async def get_delta(
    http: Request,
    run: ReadableRun,
    number: Number,
    fragment: Number,
    caller: Caller,
    service: Service,
    early: Annotated[bool, Query(description="A member is still uploading its own contribution.")] = False,
    direct: Direct = False,
) -> Response:
    """Download the averaged pseudo-gradient. Long-polls with `Prefer: wait=SECONDS` until it is published."""
    layout_with(run, fragment)

    query = run, number, fragment, caller.member, early
    from_memory, under_lock = partial(deltas.status_from_memory, *query), partial(deltas.status_under_lock, *query)
    wait_s = preferred_wait_s(http)
    found = await poll(service, caller, run.name, delta_of(fragment), wait_s, from_memory, under_lock)
    if isinstance(found, str):
        raise Problem("not-published", found, retry_after_s=1)
    # Only the last round's deltas: an older one may still be in memory although the retention rule has deleted it.
    recent = run.context.memory.delta(found) if (number, fragment) in run.outer.deltas else None
    if recent is not None and not (direct and run.blobs.direct) and not is_sent_by_standby(http):
        return memory_response(http, recent, found)
    return await run_in_threadpool(_stored_delta, http, run, number, fragment, found, direct)


def _stored_delta(http: Request, run: LiveRun, number: int, fragment: int, digest: bytes, direct: bool) -> Response:
    stored = run_reports.stored_delta(run, number, fragment, digest)
    if direct and (redirect := direct_response(http, run.blobs, stored)) is not None:
        return redirect
    return blob_response(http, run.blobs, stored, partial(run_reports.missing_delta, run, number, fragment))
