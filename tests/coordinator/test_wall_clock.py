"""The coordinator's wall clock is set, by a day, forwards and back: everything that goes on does so by another clock."""

from pathlib import Path

import pytest

from coordinator.reporting.alerts import CHECK_S
from coordinator.run.live_run import ALARMING
from harness.coordinator import SettableClock, coordinator_thread
from protocol.messages import Scope
from tests.coordinator.crew import crew, info, measure_everything, play_round
from tests.coordinator.test_notifications import receiving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

DAY_S = 86_400.0
NOW = 1_700_000_000.0


@pytest.mark.in_sqlite
@pytest.mark.covers("security:clock-set")
def test_a_run_goes_on_when_the_clock_is_set(tmp_path: Path) -> None:
    clock, wall = SettableClock(), SettableClock(NOW)
    with (
        receiving() as sink,
        coordinator_thread(
            tmp_path / "data", clock=clock, now=wall, notify_url=f"{sink.url}/hook", backup_dir=tmp_path / "backups"
        ) as running,
        running.client(running.token(Scope.VIEWER, expires_in_s=3 * DAY_S)) as viewer,
    ):
        wait_until(lambda: running.coordinator.last_backup_at is not None)
        members = measure_everything(running, "r")
        others = crew(running, "s", ["c"], rounds=1)
        for number, jump_s in enumerate((DAY_S, -2 * DAY_S)):
            for member in members:
                member.assignment(1 + number)
            wall.advance(jump_s)
            clock.advance(CHECK_S)
            running.coordinator.tick()
            assert running.coordinator.alerts.conditions == {}
            metrics = viewer.get("/metrics").raise_for_status().text
            assert not [line for line in metrics.splitlines() if "_seconds" in line and " -" in line]
            play_round(members, 1 + number)
            running.await_state("r", 2 + number)
            eta_s = info(running, "r")["eta_s"]
            assert eta_s is None or eta_s >= 0
        play_round(others, 0)
        assert {info(running, run)["state"] for run in "rs"} == {"finished"}
        kinds = {each["kind"] for each in info(running, "r", "/events?limit=1000")["items"]}
        assert not kinds & ({"lost", "late"} | ALARMING)
        running.token(Scope.VIEWER, note="the last")
        with running.client() as admin:
            acts = admin.get("/v1/audit").raise_for_status().json()["items"]
        assert acts[0]["act"] == "token-created", "the newest comes first"
        assert acts[0]["at"] < acts[-1]["at"]
        wait_until(lambda: [body["type"] for body in sink.bodies] == ["run-finished"] * 2)
