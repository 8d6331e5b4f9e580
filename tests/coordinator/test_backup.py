"""A database that was restored from a backup, beside files that are newer: consistent, and explained."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from harness.member import Member
from tests.coordinator.crew import assigned, crew, enlist, events, info, play_round, play_rounds, problem
from tests.coordinator.test_restart import Lives

pytestmark = pytest.mark.in_sqlite


def back_up(data_dir: Path, to: Path) -> None:
    """As an operator would, while the coordinator serves."""
    with sqlite3.connect(data_dir / "outerstep.db") as source, sqlite3.connect(to) as target:
        source.backup(target)


def restore(data_dir: Path, backup: Path) -> None:
    for name in ("outerstep.db", "outerstep.db-wal", "outerstep.db-shm"):
        (data_dir / name).unlink(missing_ok=True)
    shutil.copy(backup, data_dir / "outerstep.db")


def caught_up(member: Member) -> Member:
    """Give a member that has joined again the run's state, from the first checkpoint and the deltas."""
    for theta, momentum in zip(member.theta, member.momentum, strict=True):
        theta[:], momentum[:] = 0.5, 0
    for round_ in range(member.assignment(None).round):
        member.step(round_)
    return member


@pytest.mark.slow
@pytest.mark.covers("reliability:restored-database", "security:old-backup")
def test_the_run_goes_on_from_the_round_that_the_database_knows(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "data")
    with lives.life() as running:
        a, b = crew(running, "r", ["a", "b"], rounds=6, checkpoints="every_rounds = 2\nkeep = 3")
        for round_ in range(2):
            play_round([a, b], round_)
        a.assignment(2)
        running.await_state("r", 2)
        back_up(lives.data_dir, tmp_path / "backup.db")
        play_rounds(running, [a, b], range(2, 5))
        a.assignment(5)
    restore(lives.data_dir, tmp_path / "backup.db")
    with lives.life() as running:
        (event,) = events(running, "r", "restored-from-backup")
        assert "it has 2 rounds, but there are files of round 4" in event["message"]
        live = running.live("r")
        aside = {name.rpartition("/")[0] for name, _ in live.blobs.list(live.names.set_aside)}
        rounds = {"checkpoints/4", "contributions/4", "deltas/3", "deltas/4"}
        assert aside == {f"{live.names.set_aside}0/{each}" for each in rounds}
        assert info(running, "r")["disk_bytes"]["set_aside"] > 0
        problem(a.http.put(a.path("/lease"), json={}), "unauthorized")
        ahead = Member(running.client(), "r", "a")
        ahead.join(running.admin_token)
        assert ahead.assignment(5).action == "recover"
        assert ahead.assignment(5).round == 2
        problem(ahead.delta(5, 0, wait_s=0), "round-not-open")
        members = [caught_up(ahead), caught_up(enlist(running, "r", "b"))]
        play_rounds(running, members, range(2, 6))
        assert info(running, "r")["state_digest"] is not None
        assert info(running, "r")["divergences"] == 0
        assert info(running, "r")["tokens"] == 2 * 6 * 5 * 32
    with lives.life() as running:
        assert len(events(running, "r", "restored-from-backup")) == 1, "the next start finds nothing newer"


@pytest.mark.slow
def test_a_contribution_that_the_older_database_does_not_know_is_asked_for_again(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "data")
    with lives.life() as running:
        a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2)
        assigned([a, b], 0)
        back_up(lives.data_dir, tmp_path / "backup.db")
        a.take_part(0)
    restore(lives.data_dir, tmp_path / "backup.db")
    with lives.life() as running:
        problem(a.delta(0, 0), "contribution-lost")
        for member in (a, b):
            member.take_part(0)
        a.step(0)
        running.await_state("r", 1)
