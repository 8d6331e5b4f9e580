"""Both clients, a worker's and an operator's, read answers in the same way and say the same of them."""

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from outerstep.common.answers import raise_for_problem, read_message
from protocol import PROTOCOL_VERSION, messages
from protocol.errors import PROBLEM_PREFIX, PROBLEMS, NotUnderstood, Problem, Remedy, Transient, UnexpectedAnswer
from worker.line.retry import is_transient

URL = "http://c/v1/runs/r"


@dataclass
class Answer:
    """As little of an answer as is looked at."""

    status_code: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    request: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(method="GET", url=URL))

    def iter_bytes(self) -> Iterator[bytes]:
        yield self.body


NEWER = b'{"type": "urn:outerstep:problem:not-yet-known", "detail": "x"}'
STRANGERS: dict[str, tuple[Answer, type[Exception], str]] = {
    "a proxy without a coordinator": (Answer(502, b"<h1>Bad Gateway</h1>"), Transient, "502: '<h1>Bad Gateway</h1>'"),
    "a load balancer without a healthy coordinator": (Answer(503), Transient, "503 with nothing, as a proxy"),
    "a proxy that wants less": (Answer(429, b"slow down"), Transient, "429: 'slow down'"),
    "a proxy's timeout": (Answer(408), Transient, f"GET {URL} answered 408"),
    "a document of another kind": (Answer(500, b'{"type": "about:blank"}'), Transient, "answered 500"),
    "a list": (Answer(503, b'["not", "a", "document"]'), Transient, "answered 503"),
    "a newer coordinator's problem": (Answer(409, NEWER), NotUnderstood, "problem:not-yet-known: x (Outerstep 0.1.0"),
    "a newer coordinator's problem that passes": (Answer(503, NEWER), Transient, "problem:not-yet-known: x"),
    "another protocol": (
        Answer(200, b"{}", {"Outerstep-Protocol": "99", "Outerstep-Version": "9.0.0"}),
        NotUnderstood,
        "the coordinator (Outerstep 9.0.0, protocol 99) do not speak the same protocol: upgrade this client",
    ),
    "another server": (Answer(404, b"no such page"), UnexpectedAnswer, "'no such page'; check the URL"),
    "a redirect": (Answer(301, b"", {"Location": "https://c/v1/runs/r"}), UnexpectedAnswer, "to https://c/v1/runs/r;"),
    "a redirect to nowhere": (Answer(304), UnexpectedAnswer, "answered 304, which is not"),
    "no text at all": (Answer(400, b"\xff\xfe" * 500), UnexpectedAnswer, "answered 400"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_strangers_say(case: str) -> None:
    answer, kind, said = STRANGERS[case]
    with pytest.raises(kind) as caught:
        raise_for_problem(answer)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("told", "wanted_s"), [("17", 17.0), ("soon", None), ("-1", None), ("²", None), ("٣", None), ("9" * 5000, None)]
)
def test_when_to_ask_again(told: str, wanted_s: float | None) -> None:
    with pytest.raises(Transient) as caught:
        raise_for_problem(Answer(503, headers={"Retry-After": told}))
    assert caught.value.retry_after_s == wanted_s


@pytest.mark.parametrize("slug", PROBLEMS)
def test_every_problem_comes_back_as_itself(slug: str) -> None:
    document = Problem(slug, "because", share=0.5).document()
    row = PROBLEMS[slug]
    assert document["type"] == PROBLEM_PREFIX + slug
    assert (document["title"], document["status"]) == (row.title, row.status)
    with pytest.raises(Problem, match=f"{slug}: because") as caught:
        raise_for_problem(Answer(row.status, json.dumps(document).encode(), {"Retry-After": "3"}))
    assert (caught.value.slug, caught.value.members, caught.value.retry_after_s) == (slug, {"share": 0.5}, 3)


def test_a_problem_travels_between_the_processes_of_a_worker() -> None:
    problem = Problem("round-closed", "round 3 is closed", retry_after_s=2.0, share=0.5, round=3)
    copy = pickle.loads(pickle.dumps(problem))  # noqa: S301, our own
    assert (type(copy), str(copy), copy.retry_after_s, copy.members) == (Problem, str(problem), 2.0, problem.members)
    again = pickle.loads(pickle.dumps(Transient("later", retry_after_s=3.0)))  # noqa: S301, our own
    assert (str(again), again.retry_after_s) == ("later", 3.0)


def test_a_success_is_left_unread() -> None:
    class Stream(Answer):
        def iter_bytes(self) -> Iterator[bytes]:
            raise AssertionError("the stream was read")

    raise_for_problem(Stream(206))


def test_a_message_or_what_came_in_its_place() -> None:
    assert read_message(messages.RunChange, Answer(200, b'{"state": "paused"}')).state == "paused"
    with pytest.raises(UnexpectedAnswer, match="the message RunDetail: '<html>welcome"):
        read_message(messages.RunDetail, Answer(200, b"<html>welcome"))


def test_words_of_another_version_are_told_from_broken_ones() -> None:
    from_coordinator = {"Outerstep-Protocol": str(PROTOCOL_VERSION), "Outerstep-Version": "0.1.7"}
    later, broken = b'{"action": "hum", "reason": "", "round": 0}', b'{"action": "wa'
    with pytest.raises(NotUnderstood, match="does not know: action = 'hum': .* the coordinator Outerstep 0.1.7"):
        read_message(messages.Assignment, Answer(200, later, from_coordinator))
    for answer in (Answer(200, later), Answer(200, broken, from_coordinator)):
        with pytest.raises(UnexpectedAnswer, match="the message Assignment") as caught:
            read_message(messages.Assignment, answer)
        assert not isinstance(caught.value, NotUnderstood)


def test_what_is_worth_a_retry_is_a_column() -> None:
    """A fault of the coordinator always is; so are bytes damaged or stalled on the way, what came too often, and a run
    that is about to be at rest."""
    again = {slug for slug in PROBLEMS if is_transient(Problem(slug, ""))}
    assert again == {slug for slug, row in PROBLEMS.items() if row.remedy is Remedy.RETRY}
    assert again == {slug for slug, row in PROBLEMS.items() if row.status >= 500} | {
        "digest-mismatch",
        "request-timeout",
        "run-draining",
        "too-many-requests",
    }
