"""A backup restored into a new data directory, at another address: the crew joins again and ends with one model."""

import os
import stat
from pathlib import Path

import httpx
import pytest

from harness.coordinator import coordinator_thread
from harness.member import Member
from protocol.digest import model_digest
from protocol.messages import LeaveRequest
from tests.coordinator.crew import crew, enlist, events, info, play_round, play_rounds, problem, ready, recovered
from tests.coordinator.test_backup import caught_up
from tests.support.backing_up import back_up, restored
from tests.support.waiting import wait_until

pytestmark = pytest.mark.in_directory


@pytest.mark.slow
@pytest.mark.covers("reliability:restore-elsewhere")
def test_the_crew_goes_on_from_the_backup_and_ends_with_one_model(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        a, b = crew(running, "r", ["a", "b"], rounds=6, checkpoints="every_rounds = 2\nkeep = 3")
        for round_ in range(2):
            play_round([a, b], round_)
        a.assignment(2)
        running.await_state("r", 2)
        back_up(running.data_dir, tmp_path / "backups")
        for round_ in range(2, 5):
            play_round([a, b], round_)
        a.assignment(5)
        old_token = running.admin_token
    restored(tmp_path / "backups", tmp_path / "new")
    with coordinator_thread(tmp_path / "new") as running:
        (event,) = events(running, "r", "restored-from-backup")
        assert event["message"].startswith("backup 1 of 20")
        assert "from round 2, and every worker joins again" in event["message"]
        running.admin_token = old_token  # tokens of then are good, and names are theirs
        with httpx.Client(base_url=running.url, headers=a.http.headers) as waiting:
            problem(waiting.put(a.path("/lease"), json={}), "unauthorized")
        ahead = Member(running.client(), "r", "a")
        ahead.join(running.admin_token)
        assert (ahead.assignment(5).action, ahead.assignment(5).round) == ("recover", 2)
        members = [caught_up(ahead), caught_up(enlist(running, "r", "b"))]
        play_rounds(running, members, range(2, 6))
        digests = {model_digest(member.base(p) for p in range(len(member.theta))).hex() for member in members}
        detail = info(running, "r")
        assert digests == {detail["state_digest"]}
        assert (detail["divergences"], detail["tokens"]) == (0, 2 * 6 * 5 * 32)
    with coordinator_thread(tmp_path / "new") as running:
        assert len(events(running, "r", "restored-from-backup")) == 1, "the next start is an ordinary one"


@pytest.mark.slow
def test_what_was_acknowledged_in_the_open_round_is_in_its_delta(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2)
        ready([a, b], 0)
        a.take_part(0)
        back_up(running.data_dir, tmp_path / "backups")
        old_token = running.admin_token
        b.take_part(0)
        for member in (a, b):
            member.step(0)
        undisturbed = model_digest(a.base(p) for p in range(len(a.theta)))
    restored(tmp_path / "backups", tmp_path / "new")
    with coordinator_thread(tmp_path / "new") as running:
        running.admin_token = old_token
        assert info(running, "r", "/rounds/current")["fragments"][0]["contributors"] == ["a"]
        b = recovered(enlist(running, "r", "b"))
        b.take_part(0)
        b.step(0)
        running.await_state("r", 1)
        assert model_digest(b.base(p) for p in range(len(b.theta))) == undisturbed
        fragments = info(running, "r", "/rounds/0")["fragments"]
        assert [fragment["contributors"] for fragment in fragments] == [["a", "b"]] * 2


@pytest.mark.slow
def test_a_run_that_had_ended_is_as_it_was(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=1)
        play_rounds(running, [a], range(1))
        digest = info(running, "r")["state_digest"]
        told = LeaveRequest(state_round=1, state_digest=digest).model_dump(mode="json")
        a.http.request("DELETE", a.path(), json=told).raise_for_status()
        back_up(running.data_dir, tmp_path / "backups")
    restored(tmp_path / "backups", tmp_path / "new")
    with coordinator_thread(tmp_path / "new") as running:
        wait_until(lambda: info(running, "r")["state_digest"] is not None)
        assert (info(running, "r")["state"], info(running, "r")["state_digest"]) == ("finished", digest)


def test_a_backup_is_for_its_user_alone_and_has_no_token(tmp_path: Path) -> None:
    before = os.umask(0o077)  # as the commands have it
    try:
        with coordinator_thread(tmp_path / "data") as running:
            crew(running, "r", ["a"], rounds=1)
            secrets = [running.admin_token, running.worker_token]
            back_up(running.data_dir, tmp_path / "backups")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "backups").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    for path in files:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), path
