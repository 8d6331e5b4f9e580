"""The operators' REST client against answers of all kinds: a coordinator's, a proxy's, a stranger's, none."""

from collections.abc import Iterator

import httpx
import pytest

from protocol.errors import Problem, Transient
from protocol.messages import RunChange, Scope, TokenRequest
from tests.outerstep.examples import client_of, page, round_document, run_document


def test_a_listing_is_read_page_after_page_and_no_further_than_asked():
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        after = request.url.params.get("after")
        asked.append(after)
        first = {None: 5, "4": 3, "2": 1}[after]
        return httpx.Response(200, json=page([round_document(first), round_document(first - 1)], str(first - 1)))

    rounds = client_of(answer).rounds("a run/with a slash")
    assert [next(rounds).round for _ in range(3)] == [5, 4, 3]
    assert asked == [None, "4"]


def test_names_are_quoted_in_paths():
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.raw_path == b"/v1/runs/a%2Fb%3Fc"
        return httpx.Response(200, json=run_document())

    assert client_of(answer).change_run("a/b?c", RunChange(state="paused")).name == "demo"


@pytest.mark.parametrize(("status", "new"), [(201, True), (200, False)])
def test_creating_a_run_tells_whether_it_is_new(status: int, new: bool):
    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.headers["content-type"], request.content) == ("application/toml", "name = 'é'".encode())
        return httpx.Response(status, json=run_document())

    assert client_of(answer).create_run("name = 'é'")[1] is new


def test_who_sends_too_many_requests_waits_as_long_as_told_and_asks_again():
    too_many = Problem("too-many-requests", "200 per second")
    answers = [
        httpx.Response(429, json=too_many.document(), headers={"retry-after": "3"}),
        httpx.Response(429, json=too_many.document()),
        httpx.Response(200, json=run_document()),
    ]
    slept: list[float] = []
    client = client_of(lambda _: answers.pop(0), sleep=slept.append)
    assert client.change_run("demo", RunChange(state="paused")).name == "demo"
    assert slept == [3, 1]


def test_who_may_have_no_further_stream_waits_and_looks_again():
    refused = httpx.Response(
        429, json=Problem("too-many-requests", "16 streams").document(), headers={"retry-after": "5"}
    )
    slept: list[float] = []
    client = client_of(lambda _: refused, sleep=slept.append)
    client.wait_for_event("demo", 0, patience_s=1)
    assert slept == [5]


@pytest.mark.parametrize(
    "fault", [httpx.ConnectError("refused"), httpx.ReadTimeout(""), httpx.RemoteProtocolError("x")]
)
def test_no_answer_is_unreachable(fault: httpx.TransportError):
    def answer(_: httpx.Request) -> httpx.Response:
        raise fault

    client = client_of(answer)
    for request in (
        lambda: client.run("demo"),
        lambda: client.create_token(TokenRequest(scope=Scope.WORKER)),
        lambda: next(client.runs()),
    ):
        with pytest.raises(Transient, match=r"cannot reach the coordinator at http://coordinator\.test"):
            request()


def test_waiting_for_an_event_passes_over_comments_and_ends_with_the_first_event():
    read: list[bytes] = []

    def stream() -> Iterator[bytes]:
        for piece in (b": ping\r\n\r\n", b"id: 8\r\n", b'data: {"id": 8}\r\n\r\n', b"data: never read\r\n\r\n"):
            read.append(piece)
            yield piece

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.headers["accept"], request.headers["last-event-id"]) == ("text/event-stream", "7")
        assert request.extensions["timeout"]["read"] == 3
        return httpx.Response(200, content=stream())

    client_of(answer).wait_for_event("demo", 7, patience_s=3)
    assert len(read) == 3


def test_waiting_for_an_event_ends_by_itself_when_nothing_happens():
    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silence")

    client_of(answer).wait_for_event("demo", 7, patience_s=3)


def test_waiting_for_an_event_raises_what_the_coordinator_answers():
    problem = Problem("not-found", "there is no run demo")
    with pytest.raises(Problem, match="there is no run demo"):
        client_of(lambda _: httpx.Response(404, json=problem.document())).wait_for_event("demo", 0, patience_s=3)
