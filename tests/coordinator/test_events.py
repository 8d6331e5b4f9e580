"""Events: pages by cursor, and the live stream that resumes where it broke off."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.coordinator import InThread, Running, coordinator_thread
from harness.member import spec_toml
from tests.coordinator.crew import crew, info, pages, play_round, play_rounds, problem, set_state
from tests.support.waiting import PATIENCE_S


@contextmanager
def stream(running: Running, run: str, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The server-sent events of a run, each as {id, event, data}."""
    accept = {"Accept": "text/event-stream", **headers}
    with running.client() as client, client.stream("GET", f"/v1/runs/{run}/events", headers=accept) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield parsed(reply)


def parsed(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    for line in reply.iter_lines():
        if line.startswith(":"):
            continue  # a ping
        if line:
            key, _, value = line.partition(": ")
            event[key] = value
        elif event:
            yield {**event, "id": int(event["id"]), "data": json.loads(event["data"])}
            event = {}


@pytest.mark.slow
def test_pages_go_through_all_events_in_order_once(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"], rounds=3)
    play_rounds(shared, [member], range(3))
    everything = info(shared, run, "/events?limit=1000")
    assert everything["next"] is None
    kinds = [event["kind"] for event in everything["items"]]
    assert kinds[:5] == ["created", "joined", "seeding", "seeded", "round-opened"]
    assert {"round-published", "finished", "checkpoint"} <= set(kinds)
    assert pages(shared, f"/runs/{run}/events", 4) == everything["items"]
    assert all(event["message"] and event["at"] > 0 for event in everything["items"])


def test_the_stream_tells_the_past_and_then_what_happens(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run + "-other"))
    shared.create_run(spec_toml(run))
    with stream(shared, run) as events:
        assert next(events)["data"]["message"] == f"the run {run} was created", "and nothing of the other one"
        set_state(shared, run, "paused")
        event = next(events)
        assert (event["event"], event["data"]["kind"]) == ("paused", "paused")
        assert event["id"] == event["data"]["id"]


def test_a_stream_that_broke_off_resumes_exactly_after_the_last_event(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"], rounds=2)
    with stream(shared, run) as events:
        first = [next(events) for _ in range(3)]
    play_round([member], 0)
    everything = info(shared, run, "/events?limit=1000")["items"]
    with stream(shared, run, **{"Last-Event-ID": str(first[-1]["id"])}) as events:
        rest = [next(events) for _ in range(len(everything) - 3)]
    assert [event["data"] for event in first + rest] == everything


def test_cursors_that_are_no_numbers_of_events_are_refused(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    with shared.client() as client:
        for cursor in ("-1", "x", str(10**30)):
            problem(client.get(f"/v1/runs/{run}/events?after={cursor}"), "invalid-message")
            problem(client.get(f"/v1/runs/{run}/events", headers={"Last-Event-ID": cursor}), "invalid-message")


def test_streams_end_when_the_server_stops(tmp_path: Path) -> None:
    seen = threading.Event()

    def follow(running: Running) -> None:
        with stream(running, "r") as events:
            for _ in events:
                seen.set()

    with ThreadPoolExecutor(1) as others:
        with coordinator_thread(tmp_path / "data") as running:
            running.create_run(spec_toml("r"))
            followed = others.submit(follow, running)
            assert seen.wait(PATIENCE_S)
        followed.result(PATIENCE_S)  # it ended in good order
