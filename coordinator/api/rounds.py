"""Rounds: inspect them, contribute to them, fetch their deltas."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator import reports, round_reports
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
from coordinator.http.describing import (
    ASKS_FOR_BYTES_OR_WAITS,
    IMMUTABLE_OR_WAITED,
    OF_A_CHANGE,
    OF_A_RUN,
    OF_AN_UPLOAD,
    PART,
    UPLOADS,
    Answers,
    refusing,
)
from coordinator.http.limits import MESSAGE_BYTES, LimitedRoute, takes_up_to
from coordinator.http.receiving import Received, part_taken, received
from coordinator.http.sending import blob, blob_in_memory
from coordinator.http.telling import told
from coordinator.http.waiting import poll, preferred_wait_s
from coordinator.run.live_run import LiveRun
from coordinator.run.waiters import delta_of
from coordinator.sync import contributing, delta_status
from coordinator.trust import evaluating
from coordinator.workers import leases
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import ContributionReply, EvaluationReport, Page, PartReply, RoundDetail, RoundInfo
from protocol.wire import max_payload_bytes, max_payloads_bytes

router = APIRouter(prefix="/v1/runs/{run}/rounds", tags=["rounds"], route_class=LimitedRoute)

_OF_A_CONTRIBUTION = (
    "round-closed",
    "round-not-open",
    "run-ended",
    "contribution-conflict",
    "stale-base",
    "units-not-held",
    "not-ready",
)
_OF_A_DELTA = ("not-published", "run-ended", "round-not-open", "contribution-lost", "gone", "range-not-satisfiable")
_SAME_AGAIN: Answers = {"200": {"model": ContributionReply, "description": "It was accepted before."}, **PART}


@router.get("", response_model=Page[RoundInfo], responses=refusing(*OF_A_RUN))
async def list_rounds(
    http: Request,
    run: ReadableRun,
    limit: Items,
    after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None,
) -> Response:
    """The rounds, newest first."""
    return await told(http, round_reports.rounds, run, limit, after)


@router.get("/{number}", response_model=RoundDetail, responses=refusing(*OF_A_RUN))
async def get_round(
    http: Request,
    run: ReadableRun,
    _: Detail,
    number: Annotated[str, Path(pattern=r"^(current|\d{1,18})$")],
) -> Response:
    """One round and its fragments; `current` is the open one, or the next where none is open."""
    return await told(http, round_reports.round_detail, run, None if number == "current" else int(number))


@router.put(
    "/{number}/evaluation",
    status_code=204,
    responses=refusing(*OF_A_RUN, "round-not-open", "not-asked", *OF_A_CHANGE),
)
@takes_up_to(MESSAGE_BYTES)
def report_evaluation(run: ReadableRun, number: Number, report: EvaluationReport, worker: AnyMember) -> Response:
    """The held-out loss of the state before round `number`."""
    evaluating.record_evaluation(run, worker, number, report)
    return Response(status_code=204)


@router.put(
    "/{number}/fragments/{fragment}/contributions/{worker}",
    status_code=201,
    response_model=ContributionReply,
    responses=_SAME_AGAIN | refusing(*OF_A_RUN, *OF_AN_UPLOAD, *_OF_A_CONTRIBUTION),
    openapi_extra=UPLOADS,
)
@takes_up_to(None)
async def contribute(
    http: Request,
    response: Response,
    run: MemberRun,
    number: Number,
    fragment: Number,
    worker: PathName,
    service: Service,
) -> ContributionReply | Response:
    """Upload a contribution, whole or in parts. The same one again answers 200."""
    layout = layout_with(run, fragment)
    limit = max_payload_bytes(run.spec.sync.upload_codec, layout.elements[fragment])
    round_bytes = max_payloads_bytes(run.spec.sync.upload_codec, len(layout.fragments), layout.total_elements)
    async with received(http, service, limit, round_bytes, service.room) as arrived:
        reply = await run_in_threadpool(_accept, run, layout, worker, number, fragment, arrived)
    if isinstance(reply, PartReply):
        return part_taken(reply)
    if not reply.created:
        response.status_code = 200
    return reply


def _accept(
    run: LiveRun, layout: Layout, worker: str, number: int, fragment: int, arrived: Received
) -> ContributionReply | PartReply:
    leases.check_lease(run, worker)  # it may have ended, or been ended, while the body came
    found = arrived.complete()
    if isinstance(found, PartReply):
        assert arrived.part is not None
        accepted = contributing.accept_part(run, worker, number, fragment, arrived.part.digest)
        arrived.over = accepted is not None
        return accepted or found
    return contributing.accept(run, layout, worker, number, fragment, found)


@router.get(
    "/{number}/fragments/{fragment}/delta",
    response_class=Response,
    responses=IMMUTABLE_OR_WAITED | refusing(*OF_A_RUN, *_OF_A_DELTA),
    openapi_extra=ASKS_FOR_BYTES_OR_WAITS,
)
async def get_delta(
    http: Request,
    run: ReadableRun,
    number: Number,
    fragment: Number,
    caller: Caller,
    service: Service,
    early: Annotated[bool, Query(description="A member's own contribution is on its way.")] = False,
) -> Response:
    """The averaged pseudo-gradient. Long-polls with `Prefer: wait=SECONDS` until it is published."""
    layout_with(run, fragment)

    asked = run, number, fragment, caller.member, early
    from_memory, under_lock = partial(delta_status.from_memory, *asked), partial(delta_status.under_lock, *asked)
    wait_s = preferred_wait_s(http)
    found = await poll(service, caller, run.name, delta_of(fragment), wait_s, from_memory, under_lock)
    if isinstance(found, str):
        raise Problem("not-published", found, retry_after_s=1)
    # Only those of the last round: an older delta may still be in memory though the retention rule has deleted it.
    recent = run.context.room.delta(found) if (number, fragment) in run.outer.deltas else None
    if recent is not None:
        return blob_in_memory(http, recent, found)
    return await run_in_threadpool(_stored_delta, http, run, number, fragment, found)


def _stored_delta(http: Request, run: LiveRun, number: int, fragment: int, digest: bytes) -> Response:
    stored = reports.stored_delta(run, number, fragment, digest)
    return blob(http, run.blobs, stored, partial(reports.missing_delta, run, number, fragment))
