"""What is left on disk and in the database after many rounds, and that it is enough."""

import threading
from pathlib import Path

import numpy as np
import pytest

from coordinator.store.blobs import KINDS, Kind, round_of
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, ContributionRow
from coordinator.sync import retention
from harness.coordinator import InThread, coordinator_thread
from harness.stores import names, rounds
from protocol.outer_step import outer_step
from protocol.wire import Payload
from tests.coordinator.crew import crew, info, play_round, play_rounds
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

KINDS_IN_ORDER: tuple[Kind, ...] = ("checkpoints", "deltas", "contributions")

# every_rounds, keep -> after 5 of 7 rounds and at the end: rounds of the checkpoints, deltas and contributions kept.
CASES = [
    pytest.param(2, 2, ([2, 4], [2, 3, 4], [4]), ([6, 7], [6], []), id="every 2, keep 2"),
    pytest.param(2, 1, ([4], [3, 4], [4]), ([7], [6], []), id="every 2, keep 1"),
    pytest.param(1, 3, ([3, 4, 5], [3, 4], []), ([5, 6, 7], [5, 6], []), id="every 1, keep 3"),
    pytest.param(100, 2, ([0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([0, 7], list(range(7)), []), id="hardly ever"),
]


def kept_below(running: InThread, run: str, first: int) -> tuple[list[int], list[int], list[int]]:
    """The rounds of the checkpoints, deltas, and of the contributions below `first`."""
    checkpoints, deltas, contributions = (rounds(running.live(run), kind) for kind in KINDS_IN_ORDER)
    return checkpoints, deltas, [round_ for round_ in contributions if round_ < first]


@pytest.mark.parametrize(("every", "keep", "midway", "at_the_end"), CASES)
def test_the_rule_keeps_what_it_says_and_it_is_enough_to_recover(
    shared: InThread, run: str, every: int, keep: int, midway: tuple, at_the_end: tuple
) -> None:
    (member,) = crew(shared, run, ["w"], rounds=7, checkpoints=f"every_rounds = {every}\nkeep = {keep}")
    for round_ in range(7):
        play_round([member], round_)
        shared.await_state(run, round_ + 1)
        if round_ == 4:
            assert kept_below(shared, run, 5) == midway
    assert kept_below(shared, run, 8) == at_the_end
    for kind in KINDS:
        for round_ in rounds(shared.live(run), kind):
            assert len(names(shared.live(run), kind, round_)) == 2, "one blob per fragment"
    assert len(list(shared.live(run).outer.files.folder.iterdir())) == 4, "two state files per fragment"
    assert list((shared.data_dir / "incoming").iterdir()) == []
    listed = sorted(each["round"] for each in info(shared, run, "/checkpoints")["items"])
    assert listed == at_the_end[0]
    with shared.coordinator.database.read() as session:
        live = shared.live(run)
        rows = session.query(CheckpointFragmentRow).filter_by(run_id=live.id).all()
        assert sorted({row.round for row in rows}) == at_the_end[0]
        assert session.query(ContributionRow).filter_by(run_id=live.id).count() == 14, "rows are the history"

    oldest, outer = at_the_end[0][0], member.spec.outer
    for p, elements in enumerate(member.joined.layout.elements):
        both = np.empty(2 * elements, np.float32)
        checkpoint = member.http.get(f"/v1/runs/{run}/checkpoints/{oldest}/fragments/{p}")
        Payload.from_bytes(checkpoint.content).decode(both)
        theta, momentum = both[:elements], both[elements:]
        for round_ in range(oldest, 7):
            values = np.empty(elements, np.float32)
            Payload.from_bytes(member.delta(round_, p).content).decode(values)
            outer_step(theta, momentum, values, learning_rate=outer.learning_rate, beta=outer.momentum)
        assert np.array_equal(theta, member.theta[p])
        assert np.array_equal(momentum, member.momentum[p])


def is_free(lock: "threading.RLock") -> bool:
    """True if this thread does not hold the lock: then another one gets it soon, whoever has it now."""
    found: list[bool] = []

    def ask() -> None:
        found.append(lock.acquire(timeout=PATIENCE_S))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_blobs_are_deleted_after_their_rows_and_without_the_lock(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (member,) = crew(shared, run, ["w"], rounds=4, checkpoints="every_rounds = 1\nkeep = 1")
    live = shared.live(run)
    real, seen = live.blobs.delete, list[tuple[str, int, bool]]()

    def delete(*names: str) -> None:
        for name in names:
            if name.startswith(live.names.kind("checkpoints")):
                with shared.coordinator.database.read() as session:
                    (oldest,) = session.query(CheckpointRow.round).filter_by(run_id=live.id).all()[:1]
                seen.append((name, oldest.round, is_free(live.lock)))
        real(*names)

    monkeypatch.setattr(live.blobs, "delete", delete)
    play_rounds(shared, [member], range(4))
    assert kept_below(shared, run, 8) == ([4], [3], [])
    assert len(seen) == 8, "four checkpoints of two fragments"
    assert all(round_of(name) < oldest for name, oldest, _ in seen), "the row goes first"
    assert all(free for *_, free in seen)


def test_killed_before_the_rows_the_next_start_deletes_rows_and_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start deleted the blobs alone, so that rows named blobs that were not there."""
    with coordinator_thread(tmp_path / "data") as running, monkeypatch.context() as patched:
        (member,) = crew(running, "r", ["w"], rounds=6, checkpoints="every_rounds = 2\nkeep = 1")
        patched.setattr(retention, "clean", lambda run: None)
        play_rounds(running, [member], range(4))
    with coordinator_thread(tmp_path / "data") as running:
        assert kept_below(running, "r", 8) == ([4], [3], [])
        with running.coordinator.database.read() as session:
            assert {row.round for row in session.query(CheckpointFragmentRow)} == {4}
