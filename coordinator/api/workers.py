"""Workers: join, send heartbeats, get assignments, leave, be evicted."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from coordinator.http.access import (
    By,
    Caller,
    Items,
    Joiner,
    JoinTokenRun,
    MemberOrOperator,
    MemberRun,
    OperatorOfRun,
    PathName,
    ReadableRun,
    Service,
    is_a_member,
    may_join,
)
from coordinator.http.bodies import MESSAGE_BYTES, LimitedRoute, max_body
from coordinator.http.long_polls import poll, preferred_wait_s
from coordinator.http.openapi import (
    RUN_PROBLEMS,
    WAIT_PARAMETERS,
    WRITE_PROBLEMS,
    Responses,
    problem_responses,
)
from coordinator.http.response_cache import cached_response
from coordinator.reporting import run_reports
from coordinator.rounds import accounting, assigning, leases, membership
from coordinator.run.waiters import ASSIGNMENTS
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

JOIN_VALUES = 6 * MAX_TENSORS  # per tensor a name and usually up to four dimensions
ASSIGNMENT_VALUES = 3 * MAX_UNIT_RANGES

_REPEATED: Responses = {"200": {"model": TokenInfo, "description": "It was already exchanged."}}
_JOIN_PROBLEMS = (
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


@router.put("/{worker}", responses=problem_responses(*RUN_PROBLEMS, *_JOIN_PROBLEMS, *WRITE_PROBLEMS))
@max_body(16 << 20, values=JOIN_VALUES, large_for=may_join)  # it lists every tensor of the model
def join(run: PathName, worker: PathName, request: JoinRequest, service: Service, caller: Joiner, by: By) -> JoinReply:
    """Join or rejoin a run. The name belongs to the token from then on."""
    return membership.join(service.run(run), worker, request, caller, by, service.tokens.is_good)


@router.post(
    "/{worker}/token",
    status_code=201,
    responses=_REPEATED | problem_responses(*RUN_PROBLEMS, "run-ended", "worker-name-owned", *WRITE_PROBLEMS),
)
@max_body(MESSAGE_BYTES)
def exchange_token(
    response: Response,
    run: JoinTokenRun,
    worker: PathName,
    request: ExchangeRequest,
    service: Service,
    caller: Caller,
    by: By,
) -> TokenInfo:
    """Exchange a join token for a worker token, for this worker alone. Repeating it answers 200."""
    info, created = service.exchange_token(run, worker, request.token, caller, by)
    if not created:
        response.status_code = 200
    return info


@router.delete("/{worker}", status_code=204, responses=problem_responses(*RUN_PROBLEMS, *WRITE_PROBLEMS))
@max_body(MESSAGE_BYTES)
def leave(
    run: PathName,
    worker: PathName,
    caller: MemberOrOperator,
    service: Service,
    by: By,
    request: LeaveRequest | None = None,
) -> Response:
    """Leave a run; an operator can make a worker leave."""
    operator = None if caller.is_member(run, worker) else by
    leases.leave(service.run(run), worker, request or LeaveRequest(), operator)
    return Response(status_code=204)


@router.patch("/{worker}", responses=problem_responses(*RUN_PROBLEMS, *WRITE_PROBLEMS))
@max_body(MESSAGE_BYTES)
def change_worker(run: OperatorOfRun, worker: PathName, change: WorkerChange, by: By) -> WorkerInfo:
    """Evict a worker, ban it, lift its ban, or release its name."""
    membership.change_worker(run, worker, change, by)
    return run_reports.worker(run, worker)


@router.put("/{worker}/lease", responses=problem_responses(*RUN_PROBLEMS))
@max_body(MESSAGE_BYTES)
async def renew_lease(run: MemberRun, worker: PathName, metrics: Metrics) -> LeaseReply:
    """Send a heartbeat."""
    return leases.renew(run, worker, metrics)


@router.put(
    "/{worker}/assignment",
    responses=problem_responses(*RUN_PROBLEMS, "units-not-held", "data-mismatch", *WRITE_PROBLEMS),
    openapi_extra=WAIT_PARAMETERS,
)
@max_body(4 << 20, values=ASSIGNMENT_VALUES, large_for=is_a_member)  # it lists the carried units
async def get_assignment(
    http: Request, run: MemberRun, worker: PathName, request: AssignmentRequest, service: Service, caller: Caller
) -> Assignment:
    """Get the next assignment. Long-polls with `Prefer: wait=SECONDS` while there is nothing to do."""
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
            leases.check_lease(run, worker)  # the lease may have ended during the wait; then the worker gets no units
            assignment = assigning.assign(run, worker, request.state_round, request.carried)
        return assignment.action is not Action.WAIT, assignment

    return await poll(service, caller, run.name, ASSIGNMENTS, preferred_wait_s(http), from_memory, under_lock)


@router.get("", response_model=Page[WorkerInfo], responses=problem_responses(*RUN_PROBLEMS))
async def list_workers(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[str | None, Query()] = None
) -> Response:
    """List the workers, by name: live, lost and gone ones."""
    return await cached_response(http, run_reports.workers, run, limit, after)


@router.get("/{worker}", response_model=WorkerInfo, responses=problem_responses(*RUN_PROBLEMS))
async def get_worker(http: Request, run: ReadableRun, worker: PathName) -> Response:
    """Show a worker."""
    return await cached_response(http, run_reports.worker, run, worker)
