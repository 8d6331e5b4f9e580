"""Workers: join, heartbeat, be told what to do, leave, be sent away."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from coordinator import reports
from coordinator.http.access import Admin, Joiner, Limit, MemberOrAdmin, MemberRun, PathName, ReadableRun, Service
from coordinator.http.describing import ASKS_TO_WAIT, OF_A_CHANGE, OF_A_RUN, WAITED, refusing
from coordinator.http.limits import MESSAGE_BYTES, LimitedRoute, takes_up_to
from coordinator.http.waiting import poll, preferred_wait_s
from coordinator.runs.bell import ASSIGNMENTS
from coordinator.workers import accounting, assigning, membership
from protocol.messages import (
    Action,
    Assignment,
    AssignmentRequest,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaveRequest,
    Metrics,
    Page,
    WorkerChange,
    WorkerInfo,
)

router = APIRouter(prefix="/v1/runs/{run}/workers", tags=["workers"], route_class=LimitedRoute)

_OF_A_JOIN = ("banned", "run-ended", "worker-name-taken", "model-mismatch", "data-mismatch", "run-full")


@router.put("/{worker}", responses=refusing(*OF_A_RUN, *_OF_A_JOIN, *OF_A_CHANGE))
@takes_up_to(16 << 20)  # it lists every tensor of the model
def join(run: PathName, worker: PathName, request: JoinRequest, service: Service, _: Joiner) -> JoinReply:
    """Join or rejoin a run."""
    return membership.join(service.run(run), worker, request)


@router.delete("/{worker}", status_code=204, responses=refusing(*OF_A_RUN, *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def leave(
    run: PathName, worker: PathName, caller: MemberOrAdmin, service: Service, request: LeaveRequest | None = None
) -> Response:
    """Leave, or (an admin) make a worker leave."""
    by_operator = not caller.is_member(run, worker)
    membership.leave(service.run(run), worker, request or LeaveRequest(), by_operator=by_operator)
    return Response(status_code=204)


@router.patch("/{worker}", responses=refusing(*OF_A_RUN, *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def change_worker(run: ReadableRun, worker: PathName, change: WorkerChange, _: Admin) -> WorkerInfo:
    """Evict a worker, ban it, or let a banned one join again."""
    membership.change_worker(run, worker, change)
    return reports.worker(run, worker)


@router.put("/{worker}/lease", responses=refusing(*OF_A_RUN))
@takes_up_to(MESSAGE_BYTES)
async def renew_lease(run: MemberRun, worker: PathName, metrics: Metrics) -> LeaseReply:
    """Heartbeat."""
    return membership.renew(run, worker, metrics)


@router.put(
    "/{worker}/assignment",
    responses=WAITED | refusing(*OF_A_RUN, "units-not-held", *OF_A_CHANGE),
    openapi_extra=ASKS_TO_WAIT,
)
@takes_up_to(4 << 20)  # with the units that are carried
async def get_assignment(
    http: Request, run: MemberRun, worker: PathName, request: AssignmentRequest, service: Service
) -> Assignment:
    """What to do next. Long-polls with `Prefer: wait=SECONDS` while there is nothing to do."""

    queued = None if request.report is None else accounting.queue_report(run, worker, request.report)

    def from_memory() -> tuple[bool, Assignment] | None:
        if queued is not None and not queued.booked:
            return None
        assignment = assigning.assign_from_memory(run, worker, request.state_round, request.carried)
        return None if assignment is None else (True, assignment)

    def under_lock() -> tuple[bool, Assignment]:
        with run.lock:
            accounting.book_queued(run)
            membership.check_lease(run, worker)  # it may have ended during the wait, and no units go to the dead
            assignment = assigning.assign(run, worker, request.state_round, request.carried)
        return assignment.action is not Action.WAIT, assignment

    return await poll(service.bell, run.name, ASSIGNMENTS, preferred_wait_s(http), from_memory, under_lock)


@router.get("", responses=refusing(*OF_A_RUN))
def list_workers(
    run: ReadableRun, limit: Limit = 100, after: Annotated[str | None, Query()] = None
) -> Page[WorkerInfo]:
    """The workers, by name: those that live and those that were lost or left."""
    return reports.workers(run, limit, after)


@router.get("/{worker}", responses=refusing(*OF_A_RUN))
def get_worker(run: ReadableRun, worker: PathName) -> WorkerInfo:
    """One worker."""
    return reports.worker(run, worker)
