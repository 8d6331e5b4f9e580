"""Runs: create, list, inspect, pause, resume, drain, stop, roll back, remove; and the work units."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator import reports
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
from coordinator.http.describing import OF_A_CHANGE, OF_A_RUN, Answers, refusing
from coordinator.http.limits import MESSAGE_BYTES, LimitedRoute, takes_up_to
from coordinator.http.telling import told
from coordinator.rounds import steering
from coordinator.service import Coordinator
from coordinator.units import epochs
from protocol.errors import Problem
from protocol.messages import EpochInfo, Page, RollBack, RunChange, RunDetail, RunInfo, RunState, UnitRangeInfo
from protocol.spec.run import MAX_SPEC_BYTES

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=LimitedRoute)

_TOML = {"application/toml": {"schema": {"type": "string"}}}
_TOML_BODY = {"requestBody": {"required": True, "content": _TOML}}
_SPEC: Answers = {"200": {"content": _TOML}}
_SAME_AGAIN: Answers = {"200": {"model": RunDetail, "description": "The same spec exists already."}}


@router.post(
    "",
    status_code=201,
    responses=_SAME_AGAIN | refusing("forbidden", "invalid-spec", "run-exists", *OF_A_CHANGE),
    openapi_extra=_TOML_BODY,
)
@takes_up_to(MAX_SPEC_BYTES)
async def create_run(request: Request, response: Response, service: Service, _: Admin, by: By) -> RunDetail:
    """Create a run from a TOML spec. The same spec again answers 200 and changes nothing."""
    try:
        text = (await request.body()).decode()
    except UnicodeDecodeError as error:
        raise Problem("invalid-spec", f"the spec is not UTF-8: {error}") from error
    run, created = await run_in_threadpool(service.create_run, text, by)
    if not created:
        response.status_code = 200
    return await run_in_threadpool(reports.run_detail, run)


@router.get("", response_model=Page[RunInfo], responses=refusing())
async def list_runs(
    http: Request, service: Service, caller: Caller, limit: Items, after: Annotated[str | None, Query()] = None
) -> Response:
    """The runs, by name."""
    return await told(http, _runs, service, caller.run, limit, after)


def _runs(service: Coordinator, only: str | None, limit: int, after: str | None) -> Page[RunInfo]:
    runs = [run for run in service.runs() if only in (None, run.name) and (after is None or run.name > after)]
    items = [reports.run_info(run) for run in runs[:limit]]
    return Page(items=items, next=items[-1].name if len(runs) > limit else None)


@router.get("/{run}", response_model=RunDetail, responses=refusing(*OF_A_RUN))
async def get_run(http: Request, run: ReadableRun, _: Detail) -> Response:
    """State, reason, round, counts, and the parsed spec."""
    return await told(http, reports.run_detail, run)


@router.get("/{run}/spec", response_class=Response, responses=_SPEC | refusing(*OF_A_RUN))
def get_spec(run: ReadableRun) -> Response:
    """The spec, byte for byte as it was given."""
    return Response(reports.spec_toml(run), media_type="application/toml")


@router.get("/{run}/units", response_model=Page[EpochInfo], responses=refusing(*OF_A_RUN))
async def list_epochs(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None
) -> Response:
    """The work units of each epoch that was begun, newest first."""
    return await told(http, epochs.epochs, run, limit, after)


@router.get("/{run}/units/ranges", response_model=Page[UnitRangeInfo], responses=refusing(*OF_A_RUN))
async def list_unit_ranges(
    http: Request, run: ReadableRun, limit: Items, after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0
) -> Response:
    """What became of the work units from number `after` on, in their order."""
    return await told(http, epochs.unit_ranges, run, limit, after)


@router.patch("/{run}", responses=refusing(*OF_A_RUN, "run-ended", *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def change_run(run: OperatorOfRun, change: RunChange, by: By) -> RunDetail:
    """Pause, resume, drain or stop."""
    steering.change_state(run, RunState(change.state), by)
    return reports.run_detail(run)


@router.post("/{run}/rollback", responses=refusing(*OF_A_RUN, "rolled-back", "not-ready", *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def roll_back(run: OperatorOfRun, order: RollBack, service: Service, by: By) -> RunDetail:
    """Go back to a checkpoint, without some workers if they are named. All workers join again."""
    service.roll_back(run, order, by)
    return reports.run_detail(run)


@router.delete("/{run}", status_code=204, responses=refusing(*OF_A_RUN, "run-not-ended", "not-ready", *OF_A_CHANGE))
def remove_run(run: AdminOfRun, service: Service, by: By) -> Response:
    """Remove a run that has ended, with its files and the tokens that are for it alone."""
    service.remove_run(run.name, by)
    return Response(status_code=204)
