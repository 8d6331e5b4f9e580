"""What workers tell of bytes and seconds is all of it, and the coordinator adds it up: whole runs of the toy."""

import time
from pathlib import Path

import pytest

from protocol.messages import RoundDetail, Stage
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread

pytestmark = pytest.mark.slow


def round_detail(run: Toy, number: int) -> RoundDetail:
    with run.coordinator.client() as http:
        return RoundDetail.model_validate(http.get(f"/v1/runs/toy/rounds/{number}").raise_for_status().json())


def test_every_byte_and_every_second_of_a_run_is_in_some_account(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(min_workers=2), tmp_path)
        started = time.monotonic()
        run.workers(["a", "b"])
        took_s = time.monotonic() - started
        info, workers = run.final(), [run.told("a"), run.told("b")]
        rounds = [round_detail(run, number) for number in range(3)]
    for each in workers:
        moved = (each.metrics.upload_bytes, each.metrics.download_bytes)
        assert (each.account.upload_bytes, each.account.download_bytes) == moved
        assert 0 < each.account.total_s < took_s
        assert each.account.seconds[Stage.SYNC] > each.account.seconds[Stage.OUTER_STEP] > 0
    assert info.account.upload_bytes == sum(each.account.upload_bytes for each in workers)
    assert info.account.total_s == pytest.approx(sum(each.account.total_s for each in workers))
    for detail in rounds:
        assert set(detail.accounts) == {"a", "b"}
        assert detail.account.upload_bytes == sum(account.upload_bytes for account in detail.accounts.values())
        for account in detail.accounts.values():
            stages = {
                Stage.TRAIN,
                Stage.GATHER,
                Stage.SYNC,
                Stage.ENCODE,
                Stage.UPLOAD,
                Stage.DOWNLOAD,
                Stage.OUTER_STEP,
            }
            assert stages <= set(account.seconds)
            # Threads that work side by side do not make a stage longer than what it is a part of.
            within = (Stage.ENCODE, Stage.UPLOAD, Stage.AWAIT_DELTA, Stage.DOWNLOAD, Stage.OUTER_STEP)
            assert all(account.seconds.get(stage, 0.0) <= account.seconds[Stage.SYNC] for stage in within)
    assert rounds[1].upload_bytes == rounds[1].account.upload_bytes  # nothing but its contributions went up, and once
    assert 2 * rounds[1].delta_bytes == rounds[1].account.download_bytes
