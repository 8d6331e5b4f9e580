"""Reads shared by many clients: which client gets an older one, and how old it may be."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from coordinator.http.response_cache import READ_BYTES, ReadCache
from coordinator.reporting import run_reports
from coordinator.run.live_run import LiveRun
from harness.coordinator import InThread, coordinator_thread
from protocol.messages import RunDetail, Scope
from tests.coordinator.crew import crew
from tests.coordinator.test_events import stream


class Reader:
    """Numbered reads that end when a test allows it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> bytes:
        self.made += 1
        made = self.made
        await self.may_end.wait()
        return b"%d" % made


def reading(story: Callable[[ReadCache[bytes], Reader], Awaitable[None]], most: int = 1 << 20) -> None:
    async def run() -> None:
        reader = Reader()
        await story(ReadCache(len, most, lambda: reader.now), reader)

    asyncio.run(run())


def test_a_read_is_shared_until_it_is_too_old_for_a_caller() -> None:
    async def story(shared: ReadCache[bytes], reader: Reader) -> None:
        assert await shared.read("a", 5, reader) == (b"1", 0)
        reader.now = 3
        assert await shared.read("a", 5, reader) == (b"1", 3)
        assert await shared.read("b", 5, reader) == (b"2", 0), "another key"
        assert await shared.read("a", 2, reader) == (b"3", 0), "too old for this one"
        reader.now = 8
        assert await shared.read("a", 5, reader) == (b"3", 5)

    reading(story)


def test_concurrent_callers_share_a_read_even_if_the_first_is_cancelled() -> None:
    async def story(shared: ReadCache[bytes], reader: Reader) -> None:
        reader.may_end.clear()
        first, second = (asyncio.create_task(shared.read("a", 1, reader)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        reader.may_end.set()
        assert await second == (b"1", 0)
        assert (first.cancelled(), reader.made) == (True, 1)

    reading(story)


def test_a_failed_read_fails_for_all_waiters_and_is_not_kept() -> None:
    async def story(shared: ReadCache[bytes], reader: Reader) -> None:
        async def fails() -> bytes:
            await reader()
            raise ValueError("the disk is slow")

        found = await asyncio.gather(*(shared.read("a", 9, fails) for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in found] == ["the disk is slow"] * 3
        assert reader.made == 1
        assert await shared.read("a", 9, reader) == (b"2", 0)

    reading(story)


def test_the_newest_reads_that_fit_are_kept() -> None:
    async def story(shared: ReadCache[bytes], reader: Reader) -> None:
        for key in "abc":
            await shared.read(key, 9, reader)
        assert [(await shared.read(key, 9, reader))[0] for key in "cba"] == [b"3", b"2", b"4"]

    reading(story, most=2 * (READ_BYTES + 1))


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose detail was read, in order."""
    runs: list[str] = []
    real = run_reports.run_detail

    def run_detail(run: LiveRun) -> RunDetail:
        runs.append(run.name)
        return real(run)

    monkeypatch.setattr(run_reports, "run_detail", run_detail)
    return runs


def test_a_client_that_accepts_an_older_response_gets_one_with_its_age(tmp_path: Path, counted: list[str]) -> None:
    now = [100.0]
    with coordinator_thread(tmp_path / "data", clock=lambda: now[0]) as running:
        crew(running, "r", ["a"])
        crew(running, "s", ["a"])
        counted.clear()
        viewers = [running.client(running.token(Scope.VIEWER)) for _ in range(2)]

        def ask(viewer: httpx.Client, asked: str | None, run: str = "r") -> str | None:
            headers = {} if asked is None else {"Cache-Control": asked}
            reply = viewer.get(f"/v1/runs/{run}", headers=headers).raise_for_status()
            assert (reply.json()["name"], reply.headers["cache-control"]) == (run, "private, no-store")
            return reply.headers.get("age")

        assert ask(viewers[0], "max-age=5") == "0"
        now[0] += 2.5
        assert ask(viewers[1], "no-transform, Max-Age=5") == "3", "whole seconds, and not younger than it is"
        assert counted == ["r"]
        assert ask(viewers[1], "max-age=5", "s") == "0"
        for fresh in (None, "no-cache", "max-age=0", "max-age=-1", "max-age=x", "s-max-age=9", "max-age=99999999999"):
            assert ask(viewers[0], fresh) is None, fresh
        assert counted == ["r", "s"] + ["r"] * 7
        assert ask(viewers[0], "max-age=2") == "0", "it was too old"
        now[0] += 61
        assert ask(viewers[0], "max-age=3600") == "0", "no older than a minute, whoever asks"


def test_a_cached_response_is_not_served_to_a_token_without_access(shared: InThread, run: str) -> None:
    for each in (run, f"{run}-2"):
        crew(shared, each, ["a"])
    old = {"Cache-Control": "max-age=60"}
    with shared.client() as admin:
        assert run in {each["name"] for each in admin.get("/v1/runs?limit=1000", headers=old).json()["items"]}
    with shared.client(shared.token(Scope.VIEWER, run=f"{run}-2")) as stranger:
        seen = stranger.get("/v1/runs?limit=1000", headers=old).json()["items"]
        assert [each["name"] for each in seen] == [f"{run}-2"]
        assert stranger.get(f"/v1/runs/{run}", headers=old).status_code == 403


# --- streams ----------------------------------------------------------------------------------------------------------


def test_streams_of_one_event_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = run_reports.events

    def events(run: LiveRun, limit: int, after: int) -> object:
        reads.append(after)
        return real(run, limit, after)

    monkeypatch.setattr(run_reports, "events", events)
    with coordinator_thread(tmp_path / "data") as running:
        crew(running, "r", ["a"])
        last = max(event["id"] for event in running.client().get("/v1/runs/r/events").json()["items"])
        reads.clear()
        with ExitStack() as stack:
            streams = [stack.enter_context(stream(running, "r", **{"Last-Event-ID": str(last)})) for _ in range(8)]
            running.client().patch("/v1/runs/r", json={"state": "paused"}).raise_for_status()
            assert {next(each)["event"] for each in streams} == {"paused"}
        assert 1 <= reads.count(last) < 8
