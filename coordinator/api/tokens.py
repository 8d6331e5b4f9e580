"""Tokens: make, list, rotate, revoke, and what one's own allows; and the audit.

An admin of one run has the tokens for that run alone.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from coordinator.http.access import AdminOfSome, By, Caller, Limit, Service
from coordinator.http.describing import OF_A_CHANGE, refusing
from coordinator.http.limits import MESSAGE_BYTES, LimitedRoute, takes_up_to
from protocol.errors import Problem
from protocol.messages import AuditEntry, NewToken, Page, Scope, TokenInfo, TokenRequest, TokenSelf

router = APIRouter(prefix="/v1", tags=["tokens"], route_class=LimitedRoute)


@router.post("/tokens", status_code=201, responses=refusing("forbidden", "not-found", *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def create_token(request: TokenRequest, service: Service, admin: AdminOfSome, by: By) -> NewToken:
    """Make a token. Its secret is in this answer and nowhere else."""
    if admin.run not in (None, request.run):
        raise Problem("forbidden", f"this admin token is for the run {admin.run} alone; make tokens with that run")
    return service.new_token(request, by)


@router.get("/tokens", responses=refusing("forbidden"))
def list_tokens(
    service: Service, admin: AdminOfSome, limit: Limit = 100, after: Annotated[str | None, Query()] = None
) -> Page[TokenInfo]:
    """The tokens, without secrets."""
    items = service.tokens.listed(limit + 1, after, admin.run)
    return Page(items=items[:limit], next=items[limit - 1].id if len(items) > limit else None)


@router.get("/tokens/self", responses=refusing())
async def get_own_token(caller: Caller) -> TokenSelf:
    """What the token of this very request allows."""
    allows = [scope for scope in Scope if caller.allows(scope, caller.run)]
    return TokenSelf(id=caller.token, scope=caller.scope, allows=allows, run=caller.run, worker=caller.worker)


@router.post("/tokens/{token_id}/secret", responses=refusing("forbidden", "not-found", *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def rotate_token(token_id: str, service: Service, admin: AdminOfSome, by: By) -> NewToken:
    """Give a token another secret; the one before is refused from now on. Its members and names stay."""
    return service.rotate_token(token_id, by, admin.run)


@router.delete("/tokens/{token_id}", status_code=204, responses=refusing("forbidden", "not-found", *OF_A_CHANGE))
def revoke_token(token_id: str, service: Service, admin: AdminOfSome, by: By) -> Response:
    """Revoke a token. The leases of workers that joined with it end, and all that waits or streams by it."""
    service.revoke_token(token_id, by, admin.run)
    return Response(status_code=204)


@router.get("/audit", responses=refusing("forbidden"))
def list_audit(
    service: Service,
    admin: AdminOfSome,
    limit: Limit = 100,
    after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None,
) -> Page[AuditEntry]:
    """Who did what with a token, or to one, newest first."""
    return service.audit(admin.run, limit, after)
