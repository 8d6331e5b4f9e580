"""kill -9 of the coordinator and of a worker in the middle of a round: the run ends as if nothing had happened.

What an undisturbed run ends with is known from the reference, which `test_reference.py` holds equal to one.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.coordinator import CoordinatorProcess
from harness.seaweedfs import SeaweedFS
from tests.support.disturbing import ERROR_FEEDBACK, INT8, go_on, train_disturbed
from tests.support.workers import ForkedWorker

pytestmark = pytest.mark.system


def kill_the_worker(coordinator: CoordinatorProcess, worker: ForkedWorker) -> None:
    worker.kill()
    worker.start()


def kill_the_coordinator(coordinator: CoordinatorProcess, worker: ForkedWorker) -> None:
    coordinator.kill()
    coordinator.start()
    go_on(worker)


def kill_both(coordinator: CoordinatorProcess, worker: ForkedWorker) -> None:
    coordinator.kill()
    worker.kill()
    worker.start()  # finds nobody, and goes on asking
    coordinator.start()


@pytest.mark.covers("reliability:bit-equal-replicas")
@pytest.mark.parametrize(
    ("disturb", "codecs"),
    [
        pytest.param(kill_the_coordinator, INT8, id="coordinator"),
        # What a worker has not sent yet survives, and what the coordinator has not delivered.
        pytest.param(kill_the_worker, ERROR_FEEDBACK, id="worker, error feedback", marks=pytest.mark.nightly),
        pytest.param(kill_both, ERROR_FEEDBACK, id="both, error feedback", marks=pytest.mark.nightly),
    ],
)
def test_a_kill_9_in_the_middle_of_a_round_changes_nothing(
    tmp_path: Path, disturb: Callable[[CoordinatorProcess, ForkedWorker], None], codecs: str
) -> None:
    train_disturbed(tmp_path, CoordinatorProcess(tmp_path / "data"), disturb, codecs)


@pytest.mark.nightly
def test_a_kill_9_of_the_coordinator_or_of_its_bucket_changes_nothing(tmp_path: Path, store: SeaweedFS) -> None:
    def kill_one_then_the_other(coordinator: CoordinatorProcess, worker: ForkedWorker) -> None:
        kill_the_coordinator(coordinator, worker)
        store.kill()
        store.start()

    coordinator = CoordinatorProcess(tmp_path / "data", blobs=store.url("killed"))
    train_disturbed(tmp_path, coordinator, kill_one_then_the_other, INT8)
    assert not list((tmp_path / "data" / "runs").rglob("*.*.*")), "no blob is in the data directory"
