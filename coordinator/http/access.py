"""Who may call a route. A route declares it by the type of a parameter: Admin, AdminOfSome, AdminOfRun, OperatorOfRun,
OperatorOfAll, Joiner, LineChecker, JoinTokenRun, ReadableRun, MemberRun, AnyMember, MemberOrOperator; or Caller, for
any token. `By` is the caller as the audit log records it. The other parameters that routes share are here too: the
coordinator, the path, paging.

A token for one run is rejected where a route is about another run, or about all runs.
"""

from typing import Annotated

from fastapi import Depends, Path, Query, Request, Security
from fastapi.security import HTTPBearer

from coordinator.quotas import lineage_of
from coordinator.run.live_run import LiveRun
from coordinator.service import Coordinator
from coordinator.store.identity import Actor, Identity
from outerstep.common.quantities import counted
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import Scope
from protocol.spec.sections import NAME_PATTERN

_bearer = HTTPBearer(auto_error=False)


async def get_coordinator(request: Request) -> Coordinator:
    """Return the coordinator. All dependencies in this module are `async`, because FastAPI runs others on a thread,
    which costs more."""
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


Service = Annotated[Coordinator, Depends(get_coordinator)]


async def get_identity(request: Request, _: Annotated[object, Depends(_bearer)]) -> Identity:
    """Return the token's holder, which `Admit` has set. `_bearer` only serves OpenAPI."""
    identity: Identity = request.state.identity
    return identity


Caller = Annotated[Identity, Depends(get_identity)]
PathName = Annotated[str, Path(pattern=NAME_PATTERN)]
Number = Annotated[int, Path(ge=0, lt=1 << 63)]
Limit = Annotated[int, Query(ge=1, le=1000)]
ITEMS_PER_REQUEST = 10


def charge(request: Request, cost: float) -> None:
    """Count a read as `cost` more requests of its caller, unless it is an admin. Raises Problem `too-many-requests`."""
    if not request.state.identity.allows(Scope.ADMIN):
        request.app.state.coordinator.quotas.rates.take(lineage_of(request.state.identity), cost)


async def items(request: Request, _: Caller, limit: Limit = 100) -> int:
    """Return the maximum number of items in a listing, and charge the caller for them."""
    charge(request, limit / ITEMS_PER_REQUEST)
    return limit


async def detail(request: Request, _: Caller) -> None:
    """Charge the caller for the details of a run or a round: as much as for ten items of a listing."""
    charge(request, 1)


Items = Annotated[int, Depends(items)]
Detail = Annotated[None, Depends(detail)]


async def get_actor(request: Request, caller: Caller) -> Actor:
    """Return the caller for the audit log. Behind a proxy on the same machine, its address is taken from
    X-Forwarded-For."""
    return Actor(caller.token, None if request.client is None else request.client.host)


By = Annotated[Actor, Depends(get_actor)]


def _check(caller: Identity, scope: Scope, run: str | None, detail: str) -> Identity:
    """Return the caller. Raises Problem `forbidden` unless it has the scope for `run` (None: for all runs)."""
    if not caller.allows(scope, caller.run):
        raise Problem("forbidden", detail)
    if not caller.allows(scope, run):
        raise Problem("forbidden", f"this token is for the run {caller.run} alone")
    return caller


async def admin(caller: Caller) -> Identity:
    """Return the caller. Raises Problem `forbidden` unless it is an admin of all runs."""
    return _check(caller, Scope.ADMIN, None, "this needs an admin token")


async def admin_of_some(caller: Caller) -> Identity:
    """Return the caller. Raises Problem `forbidden` unless it is an admin, of all runs or of one."""
    return _check(caller, Scope.ADMIN, caller.run, "this needs an admin token")


async def admin_of_run(run: PathName, caller: Caller, service: Service) -> LiveRun:
    """Return the run of the path, for an admin."""
    _check(caller, Scope.ADMIN, run, "this needs an admin token")
    return service.run(run)


async def operator(run: PathName, caller: Caller, service: Service) -> LiveRun:
    """Return the run of the path, for an operator or an admin."""
    _check(caller, Scope.OPERATOR, run, "this needs an operator token, or an admin's")
    return service.run(run)


async def operator_of_all(caller: Caller) -> Identity:
    """Return the caller. Raises Problem `forbidden` unless it is an operator, or an admin, of all runs."""
    return _check(caller, Scope.OPERATOR, None, "this needs an operator token, or an admin's")


async def joiner(run: PathName, caller: Caller) -> Identity:
    """Return the caller. Raises Problem `forbidden` unless its token allows workers to join the run of the path."""
    if caller.allows(Scope.JOIN, caller.run):
        detail = "a join token is exchanged for a worker token first: POST /v1/runs/RUN/workers/NAME/token"
        raise Problem("forbidden", detail)
    return _check(caller, Scope.WORKER, run, "joining needs a worker token")


async def line_checker(caller: Caller) -> Identity:
    """Return the caller. Raises Problem `forbidden` unless its token is for joining some run."""
    if not caller.allows(Scope.JOIN, caller.run):
        _check(caller, Scope.WORKER, caller.run, "this needs a worker token or a join token")
    return caller


async def join_token_run(run: PathName, caller: Caller, service: Service) -> LiveRun:
    """Return the run of the path, for the holder of a join token."""
    _check(caller, Scope.JOIN, run, "only a join token can be exchanged")
    return service.run(run)


def may_join(caller: Identity) -> bool:
    """True if the caller's token allows workers to join some run."""
    return caller.allows(Scope.WORKER, caller.run)


def is_a_member(caller: Identity) -> bool:
    """True if the caller is a member of some run."""
    return caller.member is not None


async def reader(run: PathName, caller: Caller, service: Service) -> LiveRun:
    """Return the run of the path, for any token. A member, or a token for one run, reads only that run."""
    if caller.run not in (None, run):
        raise Problem("forbidden", f"this token is for the run {caller.run} alone")
    return service.run(run)


async def any_member(run: PathName, caller: Caller) -> str:
    """Return the calling worker's name. Raises Problem `forbidden` unless it is a member of the run of the path."""
    if caller.run != run or caller.member is None:
        raise Problem("forbidden", "only a member of this run may do this, with its member token")
    return caller.member


async def member_or_operator(run: PathName, worker: PathName, caller: Caller) -> Identity:
    """Return the caller. Raises Problem `forbidden` unless it is the worker of the path or an operator."""
    if caller.is_member(run, worker):
        return caller
    return _check(caller, Scope.OPERATOR, run, "only the member itself, an operator or an admin may do this")


async def member(run: PathName, worker: PathName, caller: Caller, service: Service) -> LiveRun:
    """Return the run of the path. Only the worker of the path may call."""
    if not caller.is_member(run, worker):
        raise Problem("forbidden", "only the member of this name and run may do this, with its member token")
    return service.run(run)


# `scopes` is only for OpenAPI: the kinds of tokens that a route accepts (none: any). `member` is a member token.
Admin = Annotated[Identity, Security(admin, scopes=["admin"])]
AdminOfSome = Annotated[Identity, Security(admin_of_some, scopes=["admin"])]
AdminOfRun = Annotated[LiveRun, Security(admin_of_run, scopes=["admin"])]
OperatorOfRun = Annotated[LiveRun, Security(operator, scopes=["operator"])]
OperatorOfAll = Annotated[Identity, Security(operator_of_all, scopes=["operator"])]
Joiner = Annotated[Identity, Security(joiner, scopes=["worker"])]
LineChecker = Annotated[Identity, Security(line_checker, scopes=["worker", "join"])]
JoinTokenRun = Annotated[LiveRun, Security(join_token_run, scopes=["join"])]
ReadableRun = Annotated[LiveRun, Depends(reader)]
MemberRun = Annotated[LiveRun, Security(member, scopes=["member"])]
AnyMember = Annotated[str, Security(any_member, scopes=["member"])]
MemberOrOperator = Annotated[Identity, Security(member_or_operator, scopes=["member", "operator"])]


def layout_with(run: LiveRun, fragment: int) -> Layout:
    """Return the run's layout. Raises Problem `not-found` unless it has the fragment."""
    layout = None if run.model is None else run.model.layout
    if layout is None or fragment >= len(layout.fragments):
        count = "no fragments yet" if layout is None else counted(len(layout.fragments), "fragment")
        raise Problem("not-found", f"there is no fragment {fragment}: the run {run.name} has {count}")
    return layout
