"""What is left on disk and in the database after many rounds, and that it is enough."""

import numpy as np
import pytest

from coordinator.store.blobs import KINDS
from coordinator.store.tables import CheckpointFragmentRow, ContributionRow
from harness.coordinator import InThread
from harness.stores import names, rounds
from protocol.outer_step import outer_step
from protocol.wire import Payload
from tests.coordinator.crew import crew, info, play_round

# every_rounds, keep -> after 5 of 7 rounds and at the end: rounds of the checkpoints, deltas and contributions kept.
CASES = [
    pytest.param(2, 2, ([2, 4], [2, 3, 4], [4]), ([6, 7], [6], []), id="every 2, keep 2"),
    pytest.param(2, 1, ([4], [3, 4], [4]), ([7], [6], []), id="every 2, keep 1"),
    pytest.param(1, 3, ([3, 4, 5], [3, 4], []), ([5, 6, 7], [5, 6], []), id="every 1, keep 3"),
    pytest.param(100, 2, ([0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([0, 7], list(range(7)), []), id="hardly ever"),
]


def kept(running: InThread, run: str) -> tuple[list[int], list[int], list[int]]:
    live = running.live(run)
    for kind in KINDS:
        for round_ in rounds(live, kind):
            assert len(names(live, kind, round_)) == 2, "one blob per fragment"
    return rounds(live, "checkpoints"), rounds(live, "deltas"), rounds(live, "contributions")


@pytest.mark.parametrize(("every", "keep", "midway", "at_the_end"), CASES)
def test_the_rule_keeps_what_it_says_and_it_is_enough_to_recover(
    shared: InThread, run: str, every: int, keep: int, midway: tuple, at_the_end: tuple
) -> None:
    (member,) = crew(shared, run, ["w"], rounds=7, checkpoints=f"every_rounds = {every}\nkeep = {keep}")
    for round_ in range(7):
        play_round([member], round_)
        shared.await_state(run, round_ + 1)
        if round_ == 4:
            assert (rounds(shared.live(run), "checkpoints"), rounds(shared.live(run), "deltas")) == midway[:2]
            assert [each for each in rounds(shared.live(run), "contributions") if each < 5] == midway[2]
    assert kept(shared, run) == at_the_end
    listed = sorted(each["round"] for each in info(shared, run, "/checkpoints")["items"])
    assert listed == at_the_end[0]
    with shared.coordinator.database.read() as session:
        live = shared.live(run)
        rows = session.query(CheckpointFragmentRow).filter_by(run_id=live.id).all()
        assert sorted({row.round for row in rows}) == at_the_end[0]
        assert session.query(ContributionRow).filter_by(run_id=live.id).count() == 14, "rows are the history"

    oldest = at_the_end[0][0]
    for p, elements in enumerate(member.joined.layout.elements):
        both = np.empty(2 * elements, np.float32)
        checkpoint = member.http.get(f"/v1/runs/{run}/checkpoints/{oldest}/fragments/{p}")
        Payload.from_bytes(checkpoint.content).decode(both)
        theta, momentum = both[:elements], both[elements:]
        for round_ in range(oldest, 7):
            values = np.empty(elements, np.float32)
            Payload.from_bytes(member.delta(round_, p).content).decode(values)
            outer_step(theta, momentum, values, learning_rate=1.0, beta=0.8)
        assert np.array_equal(theta, member.theta[p])
        assert np.array_equal(momentum, member.momentum[p])


def test_the_coordinator_keeps_two_state_files_per_fragment_and_no_scratch(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"], rounds=3)
    for round_ in range(3):
        play_round([member], round_)
    shared.await_state(run, 3)
    assert sorted(path.name for path in shared.live(run).outer.files.folder.iterdir()) == ["0.0", "0.1", "1.0", "1.1"]
    assert [path.name for path in (shared.data_dir / "incoming").iterdir()] == []
