"""What keeps a coordinator of a thousand workers responsive: who waits for whom, and who is woken by what."""

import asyncio
import resource
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import current_default_thread_limiter

from coordinator.rounds import assigning
from coordinator.run.waiters import ASSIGNMENTS, EVENTS, RELEASED_AT_ONCE, Waiters, delta_of
from coordinator.sync import retention
from harness.coordinator import CoordinatorProcess, InThread
from harness.stores import read, the
from protocol.messages import Action, Assignment
from tests.coordinator.crew import assigned, crew, info, play_round, problem, set_state
from tests.support.waiting import PATIENCE_S, wait_until


@contextmanager
def database_busy(running: InThread) -> Iterator[None]:
    """Somebody else writes into the database."""
    with closing(sqlite3.connect(running.data_dir / "outerstep.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_a_heartbeat_waits_neither_for_the_run_nor_for_the_database(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["a"])
    with shared.live(run).lock, database_busy(shared):
        assert member.http.put(member.path("/lease"), json={}).status_code == 200


@pytest.mark.slow
def test_a_heartbeat_does_not_wait_for_threads_that_wait_for_the_run(shared: InThread, run: str) -> None:
    """Every request took the coordinator out of the application's state by way of a thread, of which there are forty."""
    (member,) = crew(shared, run, ["a"])

    async def busy() -> bool:
        threads = current_default_thread_limiter()
        return threads.borrowed_tokens == threads.total_tokens

    def all_threads_wait() -> bool:
        return asyncio.run_coroutine_threadsafe(busy(), shared.loop).result()

    with ThreadPoolExecutor(60) as others, shared.live(run).lock:
        asking = [others.submit(set_state, shared, run, "running") for _ in range(60)]  # in the threads of uploads
        wait_until(all_threads_wait)
        assert member.http.put(member.path("/lease"), json={}).status_code == 200
        assert not any(each.done() for each in asking)
    for each in asking:
        each.result()


@pytest.mark.slow
def test_who_reads_holds_up_nobody_who_trains(shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four readers of a run's rounds had its lock for most of the time, and might have had every thread."""
    (member,) = crew(shared, run, ["a"])
    play_round([member], 0)
    begun, go_on, plain = threading.Event(), threading.Event(), retention.latest_of

    def read_slowly(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return plain(*arguments)

    with ThreadPoolExecutor(50) as others:
        monkeypatch.setattr(retention, "latest_of", read_slowly)
        asking = [others.submit(info, shared, run, "/rounds?limit=1000") for _ in range(50)]
        assert begun.wait(PATIENCE_S)
        play_round([member], 1)
        assert not any(each.done() for each in asking)
        go_on.set()
        assert all(each.result()["items"][-1]["round"] == 0 for each in asking)


def test_the_assignment_of_an_open_round_is_known_without_the_database(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], min_workers=2)
    a.assignment(0)
    opened = {member.name: member.assignment(0) for member in (b, a)}
    with database_busy(shared):
        again = {member.name: member.assignment(0) for member in (a, b)}
    assert again == opened
    assert {each.action for each in again.values()} == {Action.TRAIN}
    opening = shared.live(run).open
    assert opening is not None
    opening.assignments.clear()
    assert {member.name: member.assignment(0) for member in (a, b)} == opened  # the database says the same


def test_what_the_event_loop_answers_from_memory_is_what_the_run_would_say(shared: InThread, run: str) -> None:
    a, b, c = crew(shared, run, ["a", "b", "c"], min_workers=2)
    live = shared.live(run)
    assert assigning.assign_from_memory(live, "a", 0, None) is None, "no round is open"
    assigned([a, b], 0)
    with live.lock:  # held by another thread than the event loop's, which answers all the same
        answered = a.http.put(a.path("/assignment"), json={"state_round": 0, "carried": []})
    assert Assignment.model_validate(answered.json()) == assigning.assign(live, "a", 0, [])
    unknown = {"another state": ("a", 1), "no state": ("a", None), "not in this round yet": ("c", 0)}
    assert {
        what: assigning.assign_from_memory(live, worker, at, None) for what, (worker, at) in unknown.items()
    } == dict.fromkeys(unknown)
    c.assignment(0)
    assert assigning.assign_from_memory(live, "c", 0, None) == assigning.assign(live, "c", 0)
    assert assigning.assign_from_memory(live, "c", 0, []) is None, (
        "whether it holds units of earlier rounds is in the database"
    )
    a.http.delete(a.path()).raise_for_status()
    assert assigning.assign_from_memory(live, "a", 0, None) is None, "its lease has ended"
    set_state(shared, run, "draining")
    assert assigning.assign_from_memory(live, "b", 0, None) is None, "who may leave is for the run to say"


def test_who_waits_for_a_delta_waits_neither_for_the_run_nor_for_the_database(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    assigned([a, b], 0)
    a.take_part(0)
    with shared.live(run).lock, database_busy(shared):
        document = problem(a.delta(0, 0, wait_s=0), "not-published")
    assert document["detail"].endswith(shared.live(run).open.fragments[0].reason)  # type: ignore[union-attr]
    b.take_part(0)
    shared.await_state(run, 1)
    with shared.live(run).lock, database_busy(shared):
        published = a.delta(0, 0)
    live = shared.live(run)
    assert published.content == read(live.blobs, the(live, "deltas", 0, 0))


@pytest.mark.parametrize(
    ("topic", "woken"),
    [(delta_of(1), {delta_of(1)}), (EVENTS, {EVENTS}), (None, {EVENTS, ASSIGNMENTS, delta_of(0), delta_of(1)})],
)
def test_a_wake_up_reaches_its_topic_alone(topic: str | None, woken: set[str]) -> None:
    async def reached() -> set[str]:
        waiters = Waiters()
        waiters.attach(asyncio.get_running_loop())
        with ExitStack() as stack:
            topics = (EVENTS, ASSIGNMENTS, delta_of(0), delta_of(1))
            registered = {each: stack.enter_context(waiters.register("r", each)) for each in topics}
            other = stack.enter_context(waiters.register("another run", EVENTS))
            waiters.wake("r", topic)
            await asyncio.gather(*(registered[each].wait() for each in woken))
            assert not other.is_set()
            return {each for each, event in registered.items() if event.is_set()}

    assert asyncio.run(reached()) == woken


def test_of_a_crowd_that_is_woken_a_few_are_let_go_at_a_time_and_who_came_first_is_first() -> None:
    async def passes() -> list[int]:
        waiters = Waiters()
        waiters.attach(asyncio.get_running_loop())
        with ExitStack() as stack:
            events = [stack.enter_context(waiters.register("r", ASSIGNMENTS)) for _ in range(5 * RELEASED_AT_ONCE)]
            waiters.wake("r", ASSIGNMENTS)
            counts = []
            while not events[-1].is_set():
                await asyncio.sleep(0)  # one pass of the event loop, in which others are served
                assert sorted(events, key=lambda event: not event.is_set()) == events
                counts.append(sum(event.is_set() for event in events))
            return counts

    assert asyncio.run(passes()) == [RELEASED_AT_ONCE * each for each in range(1, 6)]


@pytest.mark.slow
def test_the_server_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    coordinator = CoordinatorProcess(tmp_path / "data")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        coordinator.start()
        assert coordinator.process is not None
        assert resource.prlimit(coordinator.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        coordinator.stop()
