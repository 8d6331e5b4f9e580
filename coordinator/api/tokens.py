"""Tokens: create, list, rotate, revoke, and show what a token allows. Also the audit log.

An admin of one run manages only the tokens for that run.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from coordinator.http.access import AdminOfSome, By, Caller, Limit, Service
from coordinator.http.bodies import MESSAGE_BYTES, LimitedRoute, max_body
from coordinator.http.openapi import WRITE_PROBLEMS, problem_responses
from protocol.errors import Problem
from protocol.messages import AuditEntry, NewToken, Page, Scope, TokenInfo, TokenRequest, TokenSelf

router = APIRouter(prefix="/v1", tags=["tokens"], route_class=LimitedRoute)


@router.post("/tokens", status_code=201, responses=problem_responses("forbidden", "not-found", *WRITE_PROBLEMS))
@max_body(MESSAGE_BYTES)
def create_token(request: TokenRequest, service: Service, admin: AdminOfSome, by: By) -> NewToken:
    """Create a token. Its secret is in this response and nowhere else."""
    if admin.run not in (None, request.run):
        raise Problem("forbidden", f"this admin token is for the run {admin.run} alone; create tokens for that run")
    return service.new_token(request, by)


@router.get("/tokens", responses=problem_responses("forbidden"))
def list_tokens(
    service: Service, admin: AdminOfSome, limit: Limit = 100, after: Annotated[str | None, Query()] = None
) -> Page[TokenInfo]:
    """List the tokens, without secrets."""
    items = service.tokens.listed(limit + 1, after, admin.run)
    return Page(items=items[:limit], next=items[limit - 1].id if len(items) > limit else None)


@router.get("/tokens/self", responses=problem_responses())
async def get_own_token(caller: Caller) -> TokenSelf:
    """Show what the token of this request allows."""
    allows = [scope for scope in Scope if caller.allows(scope, caller.run)]
    return TokenSelf(id=caller.token, scope=caller.scope, allows=allows, run=caller.run, worker=caller.worker)


@router.post("/tokens/{token_id}/secret", responses=problem_responses("forbidden", "not-found", *WRITE_PROBLEMS))
@max_body(MESSAGE_BYTES)
def rotate_token(token_id: str, service: Service, admin: AdminOfSome, by: By) -> NewToken:
    """Give a token a new secret; the old one is rejected from now on. Its members and worker names stay."""
    return service.rotate_token(token_id, by, admin.run)


@router.delete(
    "/tokens/{token_id}", status_code=204, responses=problem_responses("forbidden", "not-found", *WRITE_PROBLEMS)
)
def revoke_token(token_id: str, service: Service, admin: AdminOfSome, by: By) -> Response:
    """Revoke a token. The leases of workers that joined with it end, and so do its long polls and streams."""
    service.revoke_token(token_id, by, admin.run)
    return Response(status_code=204)


@router.get("/audit", responses=problem_responses("forbidden"))
def list_audit(
    service: Service,
    admin: AdminOfSome,
    limit: Limit = 100,
    after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None,
) -> Page[AuditEntry]:
    """List the actions done with tokens or on them, newest first."""
    return service.audit(admin.run, limit, after)
