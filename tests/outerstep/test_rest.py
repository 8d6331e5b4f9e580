"""The operators' REST client against answers of all kinds: a coordinator's, a proxy's, a stranger's, none."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from outerstep.rest import Client
from protocol.errors import Problem, Transient, UnexpectedAnswer
from protocol.messages import RunChange, Scope, TokenRequest
from tests.outerstep.examples import event_document, page, round_document, run_document


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> Client:
    transport = httpx.MockTransport(answer)
    return Client(httpx.Client(base_url="http://coordinator.test", transport=transport))


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
    transport = httpx.MockTransport(lambda _: answers.pop(0))
    client = Client(httpx.Client(base_url="http://coordinator.test", transport=transport), sleep=slept.append)
    assert client.change_run("demo", RunChange(state="paused")).name == "demo"
    assert slept == [3, 1]


def test_who_may_have_no_further_stream_waits_and_looks_again():
    refused = httpx.Response(
        429, json=Problem("too-many-requests", "16 streams").document(), headers={"retry-after": "5"}
    )
    slept: list[float] = []
    transport = httpx.MockTransport(lambda _: refused)
    client = Client(httpx.Client(base_url="http://coordinator.test", transport=transport), sleep=slept.append)
    client.wait_for_event("demo", 0, patience_s=1)
    assert slept == [5]


def test_a_problem_is_raised_as_such():
    problem = Problem("run-exists", "another run is called demo", retry_after_s=7, run="demo")

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(problem.status, json=problem.document(), headers={"retry-after": "7"})

    with pytest.raises(Problem, match="another run is called demo") as caught:
        client_of(answer).create_run("")
    assert (caught.value.slug, caught.value.retry_after_s, caught.value.members) == ("run-exists", 7, {"run": "demo"})


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(502, text="<h1>Bad Gateway</h1>"), Transient),
        (httpx.Response(503, json=["not", "a", "document"]), Transient),
        (httpx.Response(500, json={"type": "about:blank", "detail": "x"}), Transient),
        (httpx.Response(429, text="slow down"), Transient),
        (httpx.Response(404, text="nothing here"), UnexpectedAnswer),
        (httpx.Response(301, headers={"location": "https://elsewhere.test"}), UnexpectedAnswer),
        (httpx.Response(200, text="<html>welcome</html>"), UnexpectedAnswer),
        (httpx.Response(200, json={"id": 1}), UnexpectedAnswer),
    ],
)
def test_answers_that_are_not_a_coordinators(response: httpx.Response, error: type[Exception]):
    with pytest.raises(error, match=r"http://coordinator\.test"):
        client_of(lambda _: response).run("demo")


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


def test_events_are_read_from_the_one_after():
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["after"] == "7"
        return httpx.Response(200, json=page([event_document(8)], None))

    assert [event.id for event in client_of(answer).events("demo", after=7)] == [8]
