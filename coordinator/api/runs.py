"""Runs: create, list, inspect, pause, resume, drain, stop, remove; and the work units."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from coordinator import reports
from coordinator.http.access import Admin, Caller, Limit, ReadableRun, Service
from coordinator.http.describing import OF_A_CHANGE, OF_A_RUN, Answers, refusing
from coordinator.http.limits import MESSAGE_BYTES, LimitedRoute, takes_up_to
from coordinator.runs import epochs, steering
from protocol.errors import Problem
from protocol.messages import EpochInfo, Page, RunChange, RunDetail, RunInfo, RunState
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
async def create_run(request: Request, response: Response, service: Service, _: Admin) -> RunDetail:
    """Create a run from a TOML spec. The same spec again answers 200 and changes nothing."""
    try:
        text = (await request.body()).decode()
    except UnicodeDecodeError as error:
        raise Problem("invalid-spec", f"the spec is not UTF-8: {error}") from error
    run, created = await run_in_threadpool(service.create_run, text)
    if not created:
        response.status_code = 200
    return await run_in_threadpool(reports.run_detail, run)


@router.get("", responses=refusing())
def list_runs(
    service: Service, caller: Caller, limit: Limit = 100, after: Annotated[str | None, Query()] = None
) -> Page[RunInfo]:
    """The runs, by name."""
    runs = [run for run in service.runs() if caller.run in (None, run.name) and (after is None or run.name > after)]
    items = [reports.run_info(run) for run in runs[:limit]]
    return Page(items=items, next=items[-1].name if len(runs) > limit else None)


@router.get("/{run}", responses=refusing(*OF_A_RUN))
def get_run(run: ReadableRun) -> RunDetail:
    """State, reason, round, counts, and the parsed spec."""
    return reports.run_detail(run)


@router.get("/{run}/spec", response_class=Response, responses=_SPEC | refusing(*OF_A_RUN))
def get_spec(run: ReadableRun) -> Response:
    """The spec, byte for byte as it was given."""
    return Response(reports.spec_toml(run), media_type="application/toml")


@router.get("/{run}/units", responses=refusing(*OF_A_RUN))
def list_epochs(
    run: ReadableRun, limit: Limit = 100, after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None
) -> Page[EpochInfo]:
    """The work units of each epoch that was begun, newest first."""
    return epochs.epochs(run, limit, after)


@router.patch("/{run}", responses=refusing(*OF_A_RUN, "run-ended", *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def change_run(run: ReadableRun, change: RunChange, _: Admin) -> RunDetail:
    """Pause, resume, drain or stop."""
    steering.change_state(run, RunState(change.state))
    return reports.run_detail(run)


@router.delete("/{run}", status_code=204, responses=refusing(*OF_A_RUN, "run-not-ended", "not-ready", *OF_A_CHANGE))
def remove_run(run: ReadableRun, service: Service, _: Admin) -> Response:
    """Remove a run that has ended, with its files."""
    service.remove_run(run.name)
    return Response(status_code=204)
