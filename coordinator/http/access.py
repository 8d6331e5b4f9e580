"""Who may call a route, as the types of its parameters: Admin, Joiner, ReadableRun, MemberRun, AnyMember,
MemberOrAdmin; Caller is anybody with a token. And what else routes share: the coordinator, the path, paging."""

from typing import Annotated

from fastapi import Depends, Path, Query, Request
from fastapi.security import HTTPBearer

from coordinator.runs.live_run import LiveRun
from coordinator.service import Coordinator
from coordinator.store.tokens import Identity
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import Scope
from protocol.spec.sections import NAME_PATTERN

_bearer = HTTPBearer(auto_error=False)


async def get_coordinator(request: Request) -> Coordinator:
    """Return the coordinator. `async`, as all dependencies here: FastAPI calls others on a thread, which costs more."""
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


Service = Annotated[Coordinator, Depends(get_coordinator)]


async def get_identity(request: Request, _: Annotated[object, Depends(_bearer)]) -> Identity:
    """Return what `authentication.py` has found. `_bearer` is there for OpenAPI alone."""
    identity: Identity = request.state.identity
    return identity


Caller = Annotated[Identity, Depends(get_identity)]
PathName = Annotated[str, Path(pattern=NAME_PATTERN)]
Number = Annotated[int, Path(ge=0, lt=1 << 63)]
Limit = Annotated[int, Query(ge=1, le=1000)]


async def admin(caller: Caller) -> Identity:
    """Return the caller; Problem `forbidden` unless it is an admin."""
    if not caller.allows(Scope.ADMIN):
        raise Problem("forbidden", "this needs an admin token")
    return caller


async def joiner(caller: Caller) -> Identity:
    """Return the caller; Problem `forbidden` unless its token lets workers join."""
    if not caller.allows(Scope.WORKER):
        raise Problem("forbidden", "joining needs a worker token")
    return caller


async def reader(run: PathName, caller: Caller, service: Service) -> LiveRun:
    """Return the run of the path, for anybody with a token (a member: only its own run)."""
    if caller.run is not None and caller.run != run:
        raise Problem("forbidden", f"this member token is of the run {caller.run}")
    return service.run(run)


async def any_member(run: PathName, caller: Caller) -> str:
    """Return the name of the worker that calls; Problem `forbidden` unless it is a member of the run of the path."""
    if caller.run != run or caller.worker is None:
        raise Problem("forbidden", f"only a member of the run {run} may do this, with its member token")
    return caller.worker


async def member_or_admin(run: PathName, worker: PathName, caller: Caller) -> Identity:
    """Return the caller; Problem `forbidden` unless it is the worker of the path or an admin."""
    if not caller.is_member(run, worker) and not caller.allows(Scope.ADMIN):
        raise Problem("forbidden", f"only the member {worker} itself or an admin may do this")
    return caller


async def member(run: PathName, worker: PathName, caller: Caller, service: Service) -> LiveRun:
    """Return the run of the path, for the worker of the path alone."""
    if not caller.is_member(run, worker):
        raise Problem("forbidden", f"only the member {worker} of the run {run} may do this, with its member token")
    return service.run(run)


Admin = Annotated[Identity, Depends(admin)]
Joiner = Annotated[Identity, Depends(joiner)]
ReadableRun = Annotated[LiveRun, Depends(reader)]
MemberRun = Annotated[LiveRun, Depends(member)]
AnyMember = Annotated[str, Depends(any_member)]
MemberOrAdmin = Annotated[Identity, Depends(member_or_admin)]


def layout_with(run: LiveRun, fragment: int) -> Layout:
    """Return the run's layout; Problem `not-found` unless it has the fragment."""
    layout = None if run.model is None else run.model.layout
    if layout is None or fragment >= len(layout.fragments):
        count = "no fragments yet" if layout is None else f"{len(layout.fragments)} fragments"
        raise Problem("not-found", f"there is no fragment {fragment}: the run {run.name} has {count}")
    return layout
