"""Long polls: what `Prefer` (RFC 7240) asks for, and what the answer says was done."""

import pytest
from starlette.requests import Request

from coordinator.http.long_polls import MAX_WAIT_S, preferred_wait_s
from harness.coordinator import InThread
from tests.coordinator.crew import crew, problem


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ([], 0),
        (["wait=30"], 30),
        (["WAIT = 30"], 30),
        (['wait="30"'], 30),
        (["respond-async, wait=30"], 30),
        (["respond-async", "wait=30"], 30),
        (['note="a, wait=7", wait=30;why="x,y"'], 30),
        (["wait=30, wait=5"], 30),
        (["wait=60"], 60),
        (["wait=61"], MAX_WAIT_S),
        (["wait=1000000"], MAX_WAIT_S),
        (["wait=" + "9" * 5000], MAX_WAIT_S),
        (["wait=0"], 0),
        (["wait=-1"], 0),
        (["wait=1.5"], 0),
        (["wait=abc"], 0),
        (["wait"], 0),
        (["wait=٣"], 0),
        (["await=30"], 0),
        (["x;wait=30"], 0),
        (['note="wait=30"'], 0),
    ],
)
def test_the_wait_that_is_asked_for(headers: list[str], wait_s: float) -> None:
    """One of seven digits was once no wait at all, so that whoever asked for it asked without end."""
    raw = [(b"prefer", header.encode()) for header in headers]
    assert preferred_wait_s(Request({"type": "http", "headers": raw})) == wait_s


def test_the_answer_says_which_wait_was_applied_whatever_it_is(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"])
    asked = {"Prefer": "wait=10000000"}
    train = a.http.put(a.path("/assignment"), json={"state_round": 0}, headers=asked)
    assert (train.json()["action"], train.headers["preference-applied"]) == ("train", "wait=60")
    lost = a.delta(0, 0, wait_s=1)
    problem(lost, "contribution-lost")
    assert lost.headers["preference-applied"] == "wait=1"
    a.take_part(0)
    assert a.delta(0, 0, wait_s=30).headers["preference-applied"] == "wait=30"
    assert "preference-applied" not in a.delta(0, 0, wait_s=0).headers
    assert "preference-applied" not in a.http.get(f"/v1/runs/{run}", headers=asked).headers, "it never waits"
