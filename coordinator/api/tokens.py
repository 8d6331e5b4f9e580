"""Tokens: make, list, revoke."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from coordinator.http.access import Admin, Limit, Service
from coordinator.http.describing import OF_A_CHANGE, refusing
from coordinator.http.limits import MESSAGE_BYTES, LimitedRoute, takes_up_to
from protocol.messages import NewToken, Page, TokenInfo, TokenRequest

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], route_class=LimitedRoute)


@router.post("", status_code=201, responses=refusing("forbidden", *OF_A_CHANGE))
@takes_up_to(MESSAGE_BYTES)
def create_token(request: TokenRequest, service: Service, _: Admin) -> NewToken:
    """Make a token. Its secret is in this answer and nowhere else."""
    return service.new_token(request)


@router.get("", responses=refusing("forbidden"))
def list_tokens(
    service: Service, _: Admin, limit: Limit = 100, after: Annotated[str | None, Query()] = None
) -> Page[TokenInfo]:
    """The tokens, without secrets."""
    items = service.tokens.listed(limit + 1, after)
    return Page(items=items[:limit], next=items[limit - 1].id if len(items) > limit else None)


@router.delete("/{token_id}", status_code=204, responses=refusing("forbidden", "not-found", *OF_A_CHANGE))
def revoke_token(token_id: str, service: Service, _: Admin) -> Response:
    """Revoke a token. Workers that joined with it stay until their lease ends."""
    service.tokens.revoke(token_id)
    return Response(status_code=204)
