"""What a worker tells of itself is bounded, and what was taken before it was does no harm."""

import json

import httpx
import pytest

from coordinator.store.tables import WorkerRow
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


@pytest.mark.covers("security:hostile-host-facts")
@pytest.mark.parametrize(
    ("host", "said"),
    [
        ('{"share": NaN}', "host: share = float: give a text that can be printed, of 256 characters at most, a finite"),
        ('{"share": 1e999}', "a finite number, true, false or null"),
        ('{"phase": "\\u001b[2J"}', "host: phase = '\\x1b[2J': give a text that can be printed"),
        ('{"a": {"b": 1}}', "host: a = dict: give a text"),
        (json.dumps({"a": "x" * 10**6}), "host: a = 'xxxx"),
        (json.dumps({"x" * 10**6: 1}), "a fact is named by 1 to 64 characters that can be printed"),
        (json.dumps({f"k{i}": "" for i in range(33)}), "host: 33 facts about a machine; tell 32 at most"),
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


def test_rows_of_before_are_shown_and_their_workers_sent_away(shared: InThread, run: str) -> None:
    """NaN was answered with 500, so the worker could not even be evicted."""
    a, _ = crew(shared, run, ["a", "b"])
    live = shared.live(run)
    with live.change() as change:
        for row in change.session.query(WorkerRow).filter_by(run_id=live.id):
            row.host = {"share": float("nan"), "host": "\x1b]0;owned\x07", "list": [1], "long": "x" * 10**6}
            row.metrics = {"phase": "\x1b[2J"}
    with shared.client() as admin:
        shown = admin.get(a.path()).raise_for_status().json()
        assert shown["host"]["host"] == "\\x1b]0;owned\\x07"
        assert shown["host"]["share"] == "nan"
        assert len(shown["host"]["long"]) == 256
        assert len(admin.get(f"/v1/runs/{run}/workers").raise_for_status().json()["items"]) == 2
        assert admin.patch(a.path(), json={"state": "evicted"}).raise_for_status().json()["state"] == "evicted"
