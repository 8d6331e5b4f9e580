"""Workers: join, heartbeat, be told what to do, leave, be sent away."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from coordinator import reports
from coordinator.http.access import (
    By,
    Caller,
    ExchangersRun,
    Items,
    Joiner,
    MemberOrOperator,
    MemberRun,
    OperatorOfRun,
    PathName,
    ReadableRun,
    Service,
    is_a_member,
    may_join,
)
from coordinator.http.describing import ASKS_TO_WAIT, OF_A_CHANGE, OF_A_RUN, WAITED, Answers, refusing
from coordinator.http.limits import MESSAGE_BYTES, LimitedRoute, takes_up_to
from coordinator.http.telling import told
from coordinator.http.waiting import poll, preferred_wait_s
from coordinator.run.waiters import ASSIGNMENTS
from coordinator.workers import accounting, assigning, leases, membership
from protocol.messages import (
    MAX_TENSORS,
    Action,
    Assignment,
    AssignmentRequest,
    ExchangeRequest,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaveRequest,
    Metrics,
    Page,
    TokenInfo,
    WorkerChange,
    WorkerInfo,
)
from protocol.wire import MAX_UNIT_RANGES

router = APIRouter(prefix="/v1/runs/{run}/workers", tags=["workers"], route_class=LimitedRoute)

JOIN_VALUES = 6 * MAX_TENSORS  # of a tensor its name and, mostly, four dimensions at most
ASSIGNMENT_VALUES = 3 * MAX_UNIT_RANGES

_EXCHANGED_BEFORE: Answers = {"200": {"model": TokenInfo, "description": "It was exchanged before."}}
_OF_A_JOIN = (
    "banned",
    "run-ended",
    "run-draining",
    "worker-name-taken",
    "worker-name-owned",
    "model-mismatch",
    "data-mismatch",
    "pin-mismatch",
    "run-full",
)


@router.put("/{worker}", responses=refusing(*OF_A_RUN, *_OF_A_JOIN, *OF_A_CHANGE))
@takes_up_to(16 << 20, values=JOIN_VALUES, large_of=may_join)  # it lists every tensor of the model
def join(run: PathName, worker: PathName, request: JoinRequest, service: Service, caller: Joiner, by: By) -> JoinReply:
    """Join or rejoin a run. The name is the token's from then on."""
    return membership.join(service.run(run), worker, request, caller, by, service.tokens.is_good)


@router.post(
    "/{worker}/token",
    status_code=201,
    responses=_EXCHANGED_BEFORE | refusing(*OF_A_RUN, "run-ended", "worker-name-owned", *OF_A_CHANGE),
)
@takes_up_to(MESSAGE_BYTES)
def exchange_token(
    response: Response,
    run: ExchangersRun,
    worker: PathName,
    request: ExchangeRequest,
    service: Service,
    caller: Caller,
    by: By,
) -> TokenInfo:
    """Exchange a join token for a worker token, of this worker alone. The same again answers 200."""
    info, created = service.exchange_token(run, worker, request.token, caller, by)
    if not created:
        response.status_code = 200
    return info


@router.delete("/{worker}", status_code=204, responses=refusing(*OF_A_RUN, *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def leave(
    run: PathName,
    worker: PathName,
    caller: MemberOrOperator,
    service: Service,
    by: By,
    request: LeaveRequest | None = None,
) -> Response:
    """Leave, or (an operator) make a worker leave."""
    operator = None if caller.is_member(run, worker) else by
    leases.leave(service.run(run), worker, request or LeaveRequest(), operator)
    return Response(status_code=204)


@router.patch("/{worker}", responses=refusing(*OF_A_RUN, *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def change_worker(run: OperatorOfRun, worker: PathName, change: WorkerChange, by: By) -> WorkerInfo:
    """Evict a worker, ban it, let a banned one join again, or give its name away."""
    membership.change_worker(run, worker, change, by)
    return reports.worker(run, worker)


@router.put("/{worker}/lease", responses=refusing(*OF_A_RUN))
@takes_up_to(MESSAGE_BYTES)
async def renew_lease(run: MemberRun, worker: PathName, metrics: Metrics) -> LeaseReply:
    """Heartbeat."""
    return leases.renew(run, worker, metrics)


@router.put(
    "/{worker}/assignment",
    responses=WAITED | refusing(*OF_A_RUN, "units-not-held", "data-mismatch", *OF_A_CHANGE),
    openapi_extra=ASKS_TO_WAIT,
)
@takes_up_to(4 << 20, values=ASSIGNMENT_VALUES, large_of=is_a_member)  # with the units that are carried
async def get_assignment(
    http: Request, run: MemberRun, worker: PathName, request: AssignmentRequest, service: Service, caller: Caller
) -> Assignment:
    """What to do next. Long-polls with `Prefer: wait=SECONDS` while there is nothing to do."""

    if request.rows is not None:
        membership.check_rows(run, worker, request.rows)
    queued = None if request.report is None else accounting.queue_report(run, worker, request.report)

    def from_memory() -> tuple[bool, Assignment] | None:
        if queued is not None and not queued.booked:
            return None
        assignment = assigning.assign_from_memory(run, worker, request.state_round, request.carried)
        return None if assignment is None else (True, assignment)

    def under_lock() -> tuple[bool, Assignment]:
        with run.lock:
            accounting.book_queued(run)
            leases.check_lease(run, worker)  # it may have ended during the wait, and no units go to the dead
            assignment = assigning.assign(run, worker, request.state_round, request.carried)
        return assignment.action is not Action.WAIT, assignment

    return await poll(service, caller, run.name, ASSIGNMENTS, preferred_wait_s(http), from_memory, under_lock)


@router.get("", response_model=Page[WorkerInfo], responses=refusing(*OF_A_RUN))
async def list_workers(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[str | None, Query()] = None
) -> Response:
    """The workers, by name: those that live and those that were lost or left."""
    return await told(http, reports.workers, run, limit, after)


@router.get("/{worker}", response_model=WorkerInfo, responses=refusing(*OF_A_RUN))
async def get_worker(http: Request, run: ReadableRun, worker: PathName) -> Response:
    """One worker."""
    return await told(http, reports.worker, run, worker)
