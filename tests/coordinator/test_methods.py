"""HEAD wherever GET is answered, and what an address says of the methods that it takes."""

import httpx
import pytest

from harness.coordinator import InThread
from harness.member import Member


@pytest.mark.parametrize(
    "rest", ["rounds/0/fragments/1/delta", "checkpoints/1/fragments/1", "checkpoints/latest", "rounds", "spec"]
)
@pytest.mark.parametrize("asked", [{}, {"If-None-Match": "*"}], ids=["anything", "something new"])
def test_head_answers_as_get_without_the_body(member: Member, rest: str, asked: dict[str, str]) -> None:
    address = f"/v1/runs/blobs/{rest}"
    whole, head = member.http.get(address, headers=asked), member.http.head(address, headers=asked)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert same(head) == same(whole)


def same(reply: httpx.Response) -> dict[str, str]:
    """The headers that do not differ between two answers to the same request."""
    return {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/runs/blobs", "DELETE, GET, HEAD, PATCH"),
        ("DELETE", "/v1/runs", "GET, HEAD, POST"),
        ("POST", "/v1/runs/blobs/workers/w", "DELETE, GET, HEAD, PATCH, PUT"),
        ("GET", "/v1/runs/blobs/workers/w/lease", "PUT"),
        ("HEAD", "/v1/runs/blobs/workers/w/lease", "PUT"),
        ("DELETE", "/v1/runs/blobs/checkpoints/0/fragments/0", "GET, HEAD, PUT"),
        ("OPTIONS", "/healthz", "GET, HEAD"),
        ("POST", "/docs", "GET, HEAD"),
    ],
)
def test_a_method_that_is_not_taken_is_answered_with_those_that_are(
    shared: InThread, member: Member, method: str, path: str, allowed: str
) -> None:
    with shared.client() as client:
        reply = client.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
