"""Runs: create, list, inspect, pause, resume, drain, stop, roll back, remove; and their work units."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator.http.access import (
    Admin,
    AdminOfRun,
    By,
    Caller,
    Detail,
    Items,
    OperatorOfRun,
    ReadableRun,
    Service,
)
from coordinator.http.bodies import MESSAGE_BYTES, LimitedRoute, max_body
from coordinator.http.openapi import RUN_PROBLEMS, WRITE_PROBLEMS, Responses, problem_responses
from coordinator.http.response_cache import cached_response
from coordinator.reporting import run_reports
from coordinator.rounds import steering
from coordinator.run.units import epochs
from coordinator.service import Coordinator
from protocol.errors import Problem
from protocol.messages import EpochInfo, Page, RollBack, RunChange, RunDetail, RunInfo, RunState, UnitRangeInfo
from protocol.spec.run import MAX_SPEC_BYTES
from protocol.text import decoded

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=LimitedRoute)

_TOML = {"application/toml": {"schema": {"type": "string"}}}
_TOML_BODY = {"requestBody": {"required": True, "content": _TOML}}
_SPEC: Responses = {"200": {"content": _TOML}}
_REPEATED: Responses = {"200": {"model": RunDetail, "description": "A run with the same spec exists."}}


@router.post(
    "",
    status_code=201,
    responses=_REPEATED | problem_responses("forbidden", "invalid-spec", "run-exists", *WRITE_PROBLEMS),
    openapi_extra=_TOML_BODY,
)
@max_body(MAX_SPEC_BYTES)
async def create_run(request: Request, response: Response, service: Service, _: Admin, by: By) -> RunDetail:
    """Create a run from a TOML spec. Repeating it with the same spec answers 200 and changes nothing."""
    try:
        text = decoded(await request.body())
    except ValueError as error:
        raise Problem("invalid-spec", f"the spec is {error}") from error
    run, created = await run_in_threadpool(service.create_run, text, by)
    if not created:
        response.status_code = 200
    return await run_in_threadpool(run_reports.run_detail, run)


@router.get("", response_model=Page[RunInfo], responses=problem_responses())
async def list_runs(
    http: Request, service: Service, caller: Caller, limit: Items, after: Annotated[str | None, Query()] = None
) -> Response:
    """List the runs, by name."""
    return await cached_response(http, _runs, service, caller.run, limit, after)


def _runs(service: Coordinator, only: str | None, limit: int, after: str | None) -> Page[RunInfo]:
    runs = [run for run in service.runs() if only in (None, run.name) and (after is None or run.name > after)]
    items = [run_reports.run_info(run) for run in runs[:limit]]
    return Page(items=items, next=items[-1].name if len(runs) > limit else None)


@router.get("/{run}", response_model=RunDetail, responses=problem_responses(*RUN_PROBLEMS))
async def get_run(http: Request, run: ReadableRun, _: Detail) -> Response:
    """Show a run: state, reason, round, counts, and the parsed spec."""
    return await cached_response(http, run_reports.run_detail, run)


@router.get("/{run}/spec", response_class=Response, responses=_SPEC | problem_responses(*RUN_PROBLEMS))
def get_spec(run: ReadableRun) -> Response:
    """Download the spec, byte for byte as it was uploaded."""
    return Response(run_reports.spec_toml(run), media_type="application/toml")


@router.get("/{run}/units", response_model=Page[EpochInfo], responses=problem_responses(*RUN_PROBLEMS))
async def list_epochs(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None
) -> Response:
    """List the work units of each epoch that has begun, newest first."""
    return await cached_response(http, epochs.epochs, run, limit, after)


@router.get("/{run}/units/ranges", response_model=Page[UnitRangeInfo], responses=problem_responses(*RUN_PROBLEMS))
async def list_unit_ranges(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0
) -> Response:
    """List ranges of work units and their states, from number `after` on."""
    return await cached_response(http, epochs.unit_ranges, run, limit, after)


@router.patch("/{run}", responses=problem_responses(*RUN_PROBLEMS, "run-ended", *WRITE_PROBLEMS))
@max_body(MESSAGE_BYTES)
def change_run(run: OperatorOfRun, change: RunChange, by: By) -> RunDetail:
    """Pause, resume, drain or stop a run."""
    steering.change_state(run, RunState(change.state), by)
    return run_reports.run_detail(run)


@router.post("/{run}/rollback", responses=problem_responses(*RUN_PROBLEMS, "rolled-back", "not-ready", *WRITE_PROBLEMS))
@max_body(MESSAGE_BYTES)
def roll_back(run: OperatorOfRun, order: RollBack, service: Service, by: By) -> RunDetail:
    """Roll a run back to a checkpoint, optionally without the named workers. All workers rejoin."""
    service.roll_back(run, order, by)
    return run_reports.run_detail(run)


@router.delete(
    "/{run}", status_code=204, responses=problem_responses(*RUN_PROBLEMS, "run-not-ended", "not-ready", *WRITE_PROBLEMS)
)
def remove_run(run: AdminOfRun, service: Service, by: By) -> Response:
    """Remove a run that has ended, with its files and the tokens for it."""
    service.remove_run(run.name, by)
    return Response(status_code=204)
