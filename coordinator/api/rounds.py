"""Rounds: inspect them, contribute to them, fetch their deltas."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator.api import reports
from coordinator.api.access import Caller, Limit, MemberRun, Number, PathName, ReadableRun, Service, layout_with
from coordinator.api.blobs import blob, blob_in_memory
from coordinator.api.describing import (
    ASKS_FOR_BYTES_OR_WAITS,
    IMMUTABLE_OR_WAITED,
    OF_A_CHANGE,
    OF_A_RUN,
    OF_AN_UPLOAD,
    UPLOADS,
    Answers,
    refusing,
)
from coordinator.api.limits import LimitedRoute, takes_up_to
from coordinator.api.uploads import Upload, received
from coordinator.api.waiting import poll, preferred_wait_s
from coordinator.runs import evaluating
from coordinator.runs.bell import delta_of
from coordinator.runs.live_run import LiveRun
from coordinator.runs.opening import status
from coordinator.store.tables import FragmentRow
from coordinator.sync import contributing
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import ContributionReply, EvaluationReport, FragmentState, Page, RoundDetail, RoundInfo
from protocol.wire import max_payload_bytes

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
_SAME_AGAIN: Answers = {"200": {"model": ContributionReply, "description": "It was accepted before."}}


@router.get("", responses=refusing(*OF_A_RUN))
def list_rounds(
    run: ReadableRun, limit: Limit = 100, after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None
) -> Page[RoundInfo]:
    """The rounds, newest first."""
    return reports.rounds(run, limit, after)


@router.get("/{number}", responses=refusing(*OF_A_RUN))
def get_round(run: ReadableRun, number: Annotated[str, Path(pattern=r"^(current|\d{1,18})$")]) -> RoundDetail:
    """One round and its fragments; `current` is the open one, or the next where none is open."""
    return reports.round_detail(run, run.round if number == "current" else int(number))


@router.put(
    "/{number}/evaluation",
    status_code=204,
    responses=refusing(*OF_A_RUN, "round-not-open", *OF_A_CHANGE),
)
def report_evaluation(
    run: ReadableRun, number: Number, report: EvaluationReport, caller: Caller, service: Service
) -> Response:
    """The held-out loss of the state before round `number`."""
    if caller.worker is None:
        raise Problem("forbidden", "only a member of the run may report an evaluation")
    evaluating.evaluated(run, caller.worker, number, report)
    return Response(status_code=204)


@router.put(
    "/{number}/fragments/{fragment}/contributions/{worker}",
    status_code=201,
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
) -> ContributionReply:
    """Upload a contribution. The same one again answers 200."""
    layout = layout_with(run, fragment)
    limit = max_payload_bytes(run.spec.sync.upload_codec, layout.elements[fragment])
    async with received(http, service, limit, service.room) as upload:
        reply = await run_in_threadpool(_accept, run, layout, worker, number, fragment, upload)
    if not reply.created:
        response.status_code = 200
    return reply


def _accept(run: LiveRun, layout: Layout, worker: str, number: int, fragment: int, upload: Upload) -> ContributionReply:
    return contributing.accept(run, layout, worker, number, fragment, upload.complete())


@router.get(
    "/{number}/fragments/{fragment}/delta",
    response_class=Response,
    responses=IMMUTABLE_OR_WAITED | refusing(*OF_A_RUN, *_OF_A_DELTA),
    openapi_extra=ASKS_FOR_BYTES_OR_WAITS,
)
async def get_delta(
    http: Request, run: ReadableRun, number: Number, fragment: Number, caller: Caller, service: Service
) -> Response:
    """The averaged pseudo-gradient. Long-polls with `Prefer: wait=SECONDS` until it is published."""
    layout_with(run, fragment)

    def from_memory() -> tuple[bool, bytes | str] | None:
        return _known_digest(run, number, fragment, caller.worker)

    def under_lock() -> tuple[bool, bytes | str]:
        return _delta_digest(run, number, fragment, caller.worker)

    found = await poll(service.bell, run.name, delta_of(fragment), preferred_wait_s(http), from_memory, under_lock)
    if isinstance(found, str):
        raise Problem("not-published", found, retry_after_s=1)
    # Only those of the last round: an older delta may still be in memory though the retention rule has deleted it.
    recent = run.world.room.delta(found) if (number, fragment) in run.outer.deltas else None
    answer = None if recent is None else blob_in_memory(http, recent, found)
    if answer is None:
        name = run.names.delta(number, fragment, found)
        answer = await run_in_threadpool(blob, http, run.blobs, name, found)
    return answer


def _known_digest(run: LiveRun, number: int, fragment: int, member: str | None) -> tuple[bool, bytes | str] | None:
    """Return what `_delta_digest` would, from memory alone; None if memory does not tell. It does for a delta that was
    just published, and for a member that has contributed to one of the open round."""
    recent = run.outer.deltas.get((number, fragment))
    if recent is not None:
        return True, recent
    opening = run.open
    if opening is None or opening.number != number or run.ended:
        return None
    each = opening.fragments[fragment]
    if member not in each.contributed or each.state is FragmentState.PUBLISHED:
        return None
    return False, f"round {number}, fragment {fragment}: {each.reason}"


def _delta_digest(run: LiveRun, number: int, fragment: int, member: str | None) -> tuple[bool, bytes | str]:
    """Return (True, the delta's digest), or (False, what it waits for) before it is published.

    A member asks for the delta of its own contribution, so it is told if the coordinator does not have that: the disk
    has lost it, or the database was restored from a backup.
    """
    with run.lock:
        opening = run.open
        each = None if opening is None or opening.number != number else opening.fragments[fragment]
        if number >= run.round and (each is None or each.state is not FragmentState.PUBLISHED):
            if run.ended:
                raise Problem("run-ended", f"the run {run.name} is {run.state} and never published round {number}")
            if member is not None and number > run.round:
                raise Problem("round-not-open", f"the run is at round {run.round}; recover its state", round=run.round)
            if each is None:
                return False, f"round {number} is not open: {status(run)}"
            if member is not None and each.state is FragmentState.COLLECTING and member not in each.contributed:
                raise Problem(
                    "contribution-lost",
                    f"there is no contribution of {member} to round {number}, fragment {fragment}; send it again",
                )
            return False, f"round {number}, fragment {fragment}: {each.reason}"
        with run.world.database.read() as session:
            row = session.get(FragmentRow, (run.id, number, fragment))
        if row is None:
            raise Problem("gone", f"round {number} is history; recover from the latest checkpoint")
        assert row.delta_digest is not None
        return True, row.delta_digest
