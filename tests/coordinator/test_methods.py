"""HEAD wherever GET is answered, and what an address says of the methods that it takes."""

import threading

import httpx
import pytest

from harness.coordinator import InThread
from harness.member import Member
from tests.coordinator.crew import crew
from tests.support.waiting import PATIENCE_S


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


def test_ranges_are_of_get_alone(member: Member) -> None:
    address = "/v1/runs/blobs/checkpoints/1/fragments/1"
    whole, head = member.http.get(address), member.http.head(address, headers={"Range": "bytes=0-0"})
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(whole.content)))


@pytest.mark.usefixtures("endless_polls")
def test_head_waits_and_is_refused_as_get_is(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"])
    awaited = f"/v1/runs/{run}/rounds/0/fragments/0/delta"
    with shared.client() as reader:
        assert reader.head("/v1/runs/none").status_code == 404
        assert reader.head(awaited).headers["retry-after"] == "1"
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(reader.head(awaited, headers={"Prefer": "wait=9999"})))
        thread.start()
        a.take_part(0)
        thread.join(PATIENCE_S)
        assert (replies[0].status_code, replies[0].content) == (200, b"")
    with shared.client("ost_unknown") as nobody:
        refused = nobody.head(awaited)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")


def test_head_of_the_live_stream_of_events_ends(shared: InThread, member: Member) -> None:
    with shared.client() as reader:
        reply = reader.head("/v1/runs/blobs/events", headers={"Accept": "text/event-stream"})
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reader.get("/v1/runs/blobs").status_code == 200, "the connection lives on"


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
