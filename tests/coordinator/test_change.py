"""The one way to change a run: rows first, memory once they are committed, then whatever follows."""

import pytest

from coordinator.run.live_run import LiveRun
from harness.coordinator import InThread
from protocol.messages import RunState
from tests.coordinator.crew import crew, events, info


def test_what_fails_leaves_database_and_memory_as_they_were(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"])
    live, applied = shared.live(run), []

    def fail() -> None:
        with live.change() as change:
            change.record("test", "was never committed")
            change.after_commit(lambda: applied.append(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert applied == []
    assert events(shared, run, "test") == []
    with live.change() as change:  # and the next one is not in its way
        change.record("test", "was")
    assert [event["message"] for event in events(shared, run, "test")] == ["was"]


def test_what_follows_in_memory_follows_after_the_commit_and_in_order(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"])
    live, seen = shared.live(run), list[object]()
    with live.change() as change:
        change.after_commit(lambda: seen.append(len(events(shared, run, "test"))))
        change.after_commit(lambda: seen.append("second"))
        change.record("test", "is committed by then")
        assert seen == []
    assert seen == [1, "second"]


def test_what_a_run_holds_is_read_anywhere_and_set_by_a_change_alone(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"])
    live = shared.live(run)
    for field in ("state", "round", "model", "open"):
        with pytest.raises(AttributeError):
            setattr(live, field, None)
    with live.change() as change:
        change.set_state(RunState.PAUSED)
        before_the_commit = live.state
    assert [before_the_commit, live.state] == [RunState.RUNNING, RunState.PAUSED]
    assert info(shared, run)["state"] == "paused"


def test_a_change_within_a_change_is_refused(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"])
    live = shared.live(run)

    def nest() -> None:
        with live.change() as outer:
            outer.record("test", "outer")
            with live.change() as inner:
                inner.record("test", "inner")

    with pytest.raises(RuntimeError, match="change within a change"):
        nest()
    assert events(shared, run, "test") == []


def test_a_run_settles_by_itself_after_every_change(shared: InThread, run: str) -> None:
    """Nobody calls what opens a round, pauses a drained run or closes a fragment."""
    crew(shared, run, ["a"])
    live: LiveRun = shared.live(run)
    assert live.open is None
    with live.change() as change:
        change.after_commit(lambda: live.members.mark_ready("a"))
    assert live.open is not None
    with live.change() as change:
        change.set_state(RunState.STOPPED)
    assert info(shared, run)["state"] == "stopped"
