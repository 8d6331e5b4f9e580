"""The machine of the coordinator is lost while real workers train: restored from a backup at its address, the run goes
on, and all of them follow."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from harness.coordinator import CoordinatorProcess
from tests.support.backing_up import back_up, restored
from tests.support.disturbing import NAMES, get, hold_back, start_workers
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.workers import ForkedWorker

pytestmark = pytest.mark.system

ROUNDS = 8
UNIT_TOKENS = 4 * 32


def go_on(worker: ForkedWorker) -> None:
    """Let a worker go on that was held back."""
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGCONT)


@pytest.mark.covers("reliability:restore-elsewhere")
@pytest.mark.parametrize(
    "overlap", [pytest.param(0, id="classic"), pytest.param(2, id="streaming", marks=pytest.mark.nightly)]
)
def test_every_replica_ends_with_the_state_of_the_restored_coordinator(tmp_path: Path, overlap: int) -> None:
    torch.set_num_threads(1)
    place = tmp_path / "backups"
    text = write_text(tmp_path / "text", seed=2)
    spec = tiny_spec(
        "killed",
        text,
        seed=3,
        rounds=ROUNDS,
        min_workers=3,
        sync=f"overlap = {overlap}",
        members="lease_s = 3600\n[checkpoints]\nevery_rounds = 1\nkeep = 2",
    )
    lost, new = CoordinatorProcess(tmp_path / "data"), CoordinatorProcess(tmp_path / "new")
    running = lost.start()
    new.port = lost.port
    workers: list[ForkedWorker] = []
    try:
        workers = start_workers(running, spec, tmp_path)
        held = hold_back(running, workers[1], from_round=1)  # so that it is known of which round the backup is
        made = back_up(tmp_path / "data", place)
        assert (made.runs[0].round, made.lost) == (held, [])
        go_on(workers[1])
        assert hold_back(running, workers[1], from_round=held + 2) >= held + 2
        lost.kill()
        shutil.rmtree(tmp_path / "data")
        restored(place, tmp_path / "new")
        running = new.start()
        go_on(workers[1])
        for worker in workers:
            assert worker.wait() == 0, worker.log.read_text()
        final = get(running, f"/v1/runs/killed/checkpoints/{ROUNDS}")
        epochs = get(running, "/v1/runs/killed/units")["items"]
        detail, told = get(running, "/v1/runs/killed"), get(running, "/v1/runs/killed/workers")["items"]
        recorded = [event["kind"] for event in get(running, "/v1/runs/killed/events?limit=1000")["items"]]
    finally:
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.kill()
        lost.stop()
        new.stop()
    assert recorded.count("restored-from-backup") == 1
    assert [worker["state_digest"] for worker in told] == [final["state_digest"]] * len(NAMES)
    assert detail["tokens"] == sum(epoch["consumed"] for epoch in epochs) * UNIT_TOKENS
