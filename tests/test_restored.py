"""A run of real workers goes back: to a checkpoint, or to a backup since the machine of the coordinator is lost. All of
them follow."""

import shutil
from pathlib import Path

import pytest

from harness.coordinator import CoordinatorProcess, Running
from tests.support.backing_up import back_up, restored
from tests.support.disturbing import NAMES, UNIT_TOKENS, go_on, hold_back, train_through
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.waiting import wait_until
from tests.support.workers import ForkedWorker

pytestmark = pytest.mark.system

ROUNDS = 8


def spec(tmp_path: Path, overlap: int, checkpoints: str) -> str:
    return tiny_spec(
        "killed",
        write_text(tmp_path / "text", seed=2),
        seed=3,
        rounds=ROUNDS,
        min_workers=3,
        sync=f"overlap = {overlap}",
        members=f"lease_s = 3600\n[checkpoints]\n{checkpoints}",
    )


@pytest.mark.covers("reliability:restore-elsewhere")
@pytest.mark.parametrize(
    "overlap", [pytest.param(0, id="classic"), pytest.param(2, id="streaming", marks=pytest.mark.nightly)]
)
def test_every_replica_ends_with_the_state_of_the_restored_coordinator(tmp_path: Path, overlap: int) -> None:
    """It is at the address of the one that is lost."""
    lost, new = CoordinatorProcess(tmp_path / "data"), CoordinatorProcess(tmp_path / "new")

    def lose_the_machine(running: Running, workers: list[ForkedWorker]) -> Running:
        held = hold_back(running, workers[1], from_round=1)  # so that it is known of which round the backup is
        made = back_up(tmp_path / "data", tmp_path / "backups")
        assert (made.runs[0].round, made.lost) == (held, [])
        go_on(workers[1])
        assert hold_back(running, workers[1], from_round=held + 2) >= held + 2
        new.port = lost.port
        lost.kill()
        shutil.rmtree(tmp_path / "data")
        restored(tmp_path / "backups", tmp_path / "new")
        running = new.start()
        go_on(workers[1])
        return running

    text = spec(tmp_path, overlap, "every_rounds = 1\nkeep = 2")
    ended = train_through(tmp_path, text, [lost, new], lose_the_machine)
    ended.check_replicas()
    assert ended.events.count("restored-from-backup") == 1


@pytest.mark.covers("security:wrong-majority")
@pytest.mark.nightly
@pytest.mark.parametrize("overlap", [0, 2], ids=["classic", "streaming"])
def test_every_replica_follows_a_run_that_goes_back_to_a_checkpoint(tmp_path: Path, overlap: int) -> None:
    """The coordinator is killed on the way."""
    coordinator = CoordinatorProcess(tmp_path / "data")

    def roll_back(running: Running, workers: list[ForkedWorker]) -> Running:
        hold_back(running, workers[1], from_round=4)  # so that the run cannot end before it goes back

        def taken_back() -> bool:
            with running.client() as admin:
                return admin.post("/v1/runs/killed/rollback", json={"to": 2, "from_round": 4}).is_success

        wait_until(taken_back)  # 503 while a fragment is being averaged
        coordinator.kill()
        coordinator.start()
        go_on(workers[1])
        return running

    ended = train_through(tmp_path, spec(tmp_path, overlap, "every_rounds = 2\nkeep = 10"), [coordinator], roll_back)
    ended.check_replicas()
    assert ended.run["divergences"] == 0
    if not overlap:  # else what was under way as the run went back is missing in the next round
        assert ended.run["tokens"] == ROUNDS * len(NAMES) * 5 * UNIT_TOKENS, "each round counts once"
