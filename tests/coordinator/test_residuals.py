"""Residuals of 2-bit deltas, the coordinator's error feedback: kept as long as they are needed, over starts, damage,
rollbacks and backups."""

from pathlib import Path

import numpy as np
import pytest

from coordinator.sync.deltas import rebuild_delta_if_damaged
from harness.coordinator import InThread, coordinator_thread
from harness.member import Member
from harness.stores import read, rounds, spoil, the
from protocol.wire import Payload
from tests.coordinator.crew import crew, events, info, play_round, play_rounds
from tests.coordinator.test_rolling_back import KEPT, joined_again, roll_back
from tests.support.backing_up import back_up, restored

pytestmark = pytest.mark.slow

SYNC = 'upload_codec = "fp32"\ndownload_codec = "2bit"'
ROUNDS = 5


def two_of(running: InThread, run: str = "r", checkpoints: str = "every_rounds = 2") -> list[Member]:
    return crew(running, run, ["a", "b"], rounds=ROUNDS, min_workers=2, sync=SYNC, checkpoints=checkpoints)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the state after all rounds, undisturbed."""
    with coordinator_thread(tmp_path_factory.mktemp("undisturbed") / "data") as running:
        play_rounds(running, two_of(running), range(ROUNDS))
        return str(info(running, "r")["state_digest"])


def test_all_that_was_contributed_is_in_the_deltas_but_for_the_last_residual(shared: InThread, run: str) -> None:
    members = two_of(shared, run)
    delivered = [np.zeros_like(theta, dtype=np.float64) for theta in members[0].theta]
    first = [0.0, 0.0]
    for round_ in range(ROUNDS):
        play_round(members, round_)
        for p, total in enumerate(delivered):
            values = np.empty(len(total), np.float32)
            Payload.from_bytes(members[0].delta(round_, p).content).decode(values)
            total += values
            if round_ == 0:
                first[p] = float(np.linalg.norm(mean_of(members, 0, p) - total))
    shared.await_state(run, ROUNDS)
    for p, total in enumerate(delivered):
        missing = sum(mean_of(members, round_, p) for round_ in range(ROUNDS)) - total
        assert float(np.linalg.norm(missing)) < 1.5 * first[p], "one round's error, not the sum of all"
    assert info(shared, run)["disk_bytes"]["residuals"] > 0


def mean_of(members: list[Member], round_: int, fragment: int) -> np.ndarray:
    found: np.ndarray = np.mean([each.pseudo_gradients(round_)[fragment] for each in members], axis=0)
    return found


@pytest.mark.parametrize("over", [1, 2, 3])
def test_a_start_changes_nothing(tmp_path: Path, expected: str, over: int) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        members = two_of(running)
        play_rounds(running, members, range(over))
        port = int(running.url.rsplit(":", 1)[1])
    with coordinator_thread(tmp_path / "data", port) as running:
        play_rounds(running, members, range(over, ROUNDS))
        assert info(running, "r")["state_digest"] == expected


def test_it_is_kept_from_the_newest_checkpoint_on(shared: InThread, run: str) -> None:
    members, kept = two_of(shared, run, "every_rounds = 2\nkeep = 2"), {}
    for round_ in range(ROUNDS):
        play_rounds(shared, members, range(round_, round_ + 1))
        kept[round_] = [rounds(shared.live(run), kind) for kind in ("residuals", "deltas")]
    assert kept[2] == [[1, 2], [0, 1, 2]]
    assert kept[4] == [[4], [4]]


def test_a_damaged_residual_is_reported_once_and_not_used(shared: InThread, run: str) -> None:
    members = two_of(shared, run)
    play_rounds(shared, members, range(1))
    live = shared.live(run)
    spoil(live.blobs, the(live, "residuals", 0, 0))
    live.blobs.delete(the(live, "residuals", 0, 1))
    play_rounds(shared, members, range(1, ROUNDS))
    told = sorted(event["message"] for event in events(shared, run, "corrupt"))
    assert told == [
        "the residual of the delta of round 0, fragment 0, is corrupt on disk; the next delta is made without it",
        "the residual of the delta of round 0, fragment 1, is missing on disk; the next delta is made without it",
    ]
    assert events(shared, run, "fault") == []
    assert info(shared, run)["divergences"] == 0


def test_a_damaged_delta_is_rebuilt_with_the_residual_before_it(shared: InThread, run: str) -> None:
    members = two_of(shared, run, "every_rounds = 100")
    play_rounds(shared, members, range(2))
    live = shared.live(run)
    name = the(live, "deltas", 1, 0)
    before = read(live.blobs, name)
    spoil(live.blobs, name)
    assert rebuild_delta_if_damaged(live, 1, 0)
    assert read(live.blobs, name) == before
    spoil(live.blobs, name)
    spoil(live.blobs, the(live, "residuals", 0, 0))
    assert not rebuild_delta_if_damaged(live, 1, 0), "its source is damaged as well"
    assert len(events(shared, run, "corrupt")) == 1


@pytest.mark.parametrize("to", [2, 4])
def test_a_rollback_to_any_checkpoint_goes_on(shared: InThread, run: str, to: int) -> None:
    members = two_of(shared, run, KEPT)
    play_rounds(shared, members, range(4))
    assert roll_back(shared, run, to).json()["round"] == to
    assert all(round_ < to for round_ in rounds(shared.live(run), "residuals"))
    play_rounds(shared, joined_again(shared, run, ["a", "b"]), range(to, ROUNDS))
    assert events(shared, run, "corrupt") == events(shared, run, "fault") == []
    assert info(shared, run)["divergences"] == 0


@pytest.mark.in_directory
@pytest.mark.in_sqlite
def test_a_backup_has_the_residuals_of_the_newest_deltas(tmp_path: Path, expected: str) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        play_rounds(running, two_of(running, checkpoints=KEPT), range(3))
        old_token = running.admin_token
        back_up(tmp_path / "data", tmp_path / "backups")
    restored(tmp_path / "backups", tmp_path / "restored")
    with coordinator_thread(tmp_path / "restored") as running:
        running.admin_token = old_token
        play_rounds(running, joined_again(running, "r", ["a", "b"]), range(3, ROUNDS))
        assert info(running, "r")["state_digest"] == expected
        assert events(running, "r", "corrupt") == []
