"""What a worker tells of itself is bounded, and what was taken before it was does no harm."""

import json

import httpx
import pytest

from harness.coordinator import InThread
from tests.coordinator.crew import crew, info, problem


def join(running: InThread, run: str, host: str, name: str = "w2") -> httpx.Response:
    """The answer to a join with this JSON as its `host`."""
    (member,) = crew(running, run, ["w"])
    tensors = [each.model_dump() for each in member.joined.layout.tensors]
    data = json.dumps(info(running, run)["data"])
    body = f'{{"tensors": {json.dumps(tensors)}, "data": {data}, "host": {host}}}'
    with running.client() as http:
        return http.put(f"/v1/runs/{run}/workers/{name}", content=body, headers={"content-type": "application/json"})


@pytest.mark.slow
@pytest.mark.covers("security:hostile-host-facts")
@pytest.mark.parametrize(
    ("host", "said"),
    [
        ('{"share": NaN}', "host: share = float: give printable text of at most 256 characters, a finite"),
        ('{"share": 1e999}', "a finite number, true, false or null"),
        ('{"phase": "\\u001b[2J"}', "host: phase = '\\x1b[2J': give printable text"),
        ('{"a": {"b": 1}}', "host: a = dict: "),
        (json.dumps({"a": "x" * 10**6}), "host: a = 'xxxx"),
        (json.dumps({"x" * 10**6: 1}), "the name of a fact has 1 to 64"),
        (json.dumps({f"k{i}": "" for i in range(33)}), "host: 33 facts about a machine; at most 32"),
    ],
    ids=["NaN", "infinite", "escapes", "nested", "a long text", "a long name", "many"],
)
def test_facts_beyond_the_bounds_are_refused(shared: InThread, run: str, host: str, said: str) -> None:
    """20 joins filled the database with 315 MiB."""
    reply = join(shared, run, host)
    detail = problem(reply, "invalid-message")["detail"]
    assert said in detail
    assert len(detail) < 1000
    assert [each["name"] for each in info(shared, run, "/workers")["items"]] == ["w"]


def test_facts_within_the_bounds_are_shown(shared: InThread, run: str) -> None:
    host = {"host": "box – 7", "threads": 8, "share": 0.5, "gpu": True, "none": None}
    assert join(shared, run, json.dumps(host)).is_success
    assert info(shared, run, "/workers/w2")["host"] == host


@pytest.mark.covers("security:hostile-host-facts")
@pytest.mark.parametrize("phase", ["\x1b[31mtrain", "two\nlines", "x" * 33])
def test_a_phase_is_a_short_text_that_can_be_printed(shared: InThread, run: str, phase: str) -> None:
    (member,) = crew(shared, run, ["w"])
    assert (
        "phase" in problem(member.http.put(member.path("/lease"), json={"phase": phase}), "invalid-message")["detail"]
    )
