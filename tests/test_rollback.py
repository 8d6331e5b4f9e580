"""A run of real workers goes back to a checkpoint, and the coordinator is killed on the way: all of them follow."""

import os
import signal
from pathlib import Path

import pytest
import torch

from harness.coordinator import CoordinatorProcess
from tests.support.disturbing import NAMES, get, hold_back, start_workers
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.waiting import wait_until
from tests.support.workers import ForkedWorker

pytestmark = pytest.mark.system

ROUNDS = 8
UNIT_TOKENS = 4 * 32


@pytest.mark.covers("security:wrong-majority")
@pytest.mark.parametrize(
    "overlap", [pytest.param(0, id="classic", marks=pytest.mark.nightly), pytest.param(2, id="streaming")]
)
def test_every_replica_follows(tmp_path: Path, overlap: int) -> None:
    torch.set_num_threads(1)
    text = write_text(tmp_path / "text", seed=2)
    spec = tiny_spec(
        "killed",
        text,
        seed=3,
        rounds=ROUNDS,
        min_workers=3,
        sync=f"overlap = {overlap}",
        members="lease_s = 3600\n[checkpoints]\nevery_rounds = 2\nkeep = 10",
    )
    coordinator = CoordinatorProcess(tmp_path / "data")
    running = coordinator.start()
    workers: list[ForkedWorker] = []
    try:
        workers = start_workers(running, spec, tmp_path)
        hold_back(running, workers[1], from_round=4)  # so that the run cannot end before it goes back
        order = {"to": 2, "from_round": 4}

        def taken_back() -> bool:
            with running.client() as admin:
                return admin.post("/v1/runs/killed/rollback", json=order).is_success

        wait_until(taken_back)  # 503 while a fragment is being averaged
        coordinator.kill()
        coordinator.start()
        assert workers[1].process is not None
        os.kill(workers[1].process.pid, signal.SIGCONT)
        for worker in workers:
            assert worker.wait() == 0, worker.log.read_text()
        final = get(running, f"/v1/runs/killed/checkpoints/{ROUNDS}")
        epochs = get(running, "/v1/runs/killed/units")["items"]
        detail, told = get(running, "/v1/runs/killed"), get(running, "/v1/runs/killed/workers")["items"]
    finally:
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.kill()
        coordinator.stop()
    assert [worker["state_digest"] for worker in told] == [final["state_digest"]] * len(NAMES)
    assert detail["divergences"] == 0
    assert detail["tokens"] == sum(epoch["consumed"] for epoch in epochs) * UNIT_TOKENS
    if not overlap:  # else what was under way as the run went back is missing in the next round
        assert detail["tokens"] == ROUNDS * len(NAMES) * 5 * UNIT_TOKENS, "each round counts once"
