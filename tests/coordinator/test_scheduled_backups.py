"""Backups that the coordinator makes by itself: when, what is told of them, and what they hold up, which is nothing."""

import logging
import math
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.backup.directory import BackupSource, DirectoryBackups
from coordinator.backup.restore import Target, restore
from coordinator.backup.scheduled import RETRY_S, ScheduledBackups
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.blobs import Reader
from harness.coordinator import InThread, SettableClock, coordinator_thread
from protocol.errors import OuterstepError
from tests.coordinator.crew import crew, events, play_rounds
from tests.support.backing_up import back_up, check_restored, damages
from tests.support.waiting import PATIENCE_S, wait_until

EVERY_S = 3600.0


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def running(tmp_path: Path, clock: SettableClock) -> Iterator[InThread]:
    with coordinator_thread(
        tmp_path / "data", clock=clock, backup_dir=tmp_path / "backups", backup_every_s=EVERY_S, backup_keep=2
    ) as running:
        yield running


def numbers(tmp_path: Path) -> list[int]:
    return DirectoryBackups(tmp_path / "backups").numbers()


def await_backup(running: InThread, after: float | None) -> float:
    """Return when the last one was made, once it is another than that of before."""
    wait_until(lambda: running.coordinator.last_backup_at not in (None, after))
    at = running.coordinator.last_backup_at
    assert at is not None
    return at


def scheduled_of(running: InThread) -> ScheduledBackups:
    assert running.coordinator.backups is not None
    return running.coordinator.backups


def set_now(running: InThread, monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    scheduled = scheduled_of(running)
    monkeypatch.setattr(scheduled, "_now", lambda: now)
    make = scheduled.make
    assert isinstance(make, partial)
    monkeypatch.setattr(scheduled, "make", partial(make.func, *make.args[:-1], lambda: now))


def await_rest(running: InThread) -> None:
    """Return once the thread has nothing to do until the clock moves."""
    wait_until(lambda: scheduled_of(running).due < math.inf)


@pytest.mark.slow
def test_one_is_made_at_the_first_start_and_again_after_a_while(
    tmp_path: Path, running: InThread, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await_backup(running, None)
    await_rest(running)
    assert httpx.get(f"{running.url}/readyz").json()["last_backup_at"] == first
    assert numbers(tmp_path) == [1]
    set_now(running, monkeypatch, first + EVERY_S + 1)
    running.coordinator.tick()
    assert numbers(tmp_path) == [1], "not before its time"
    (a,) = crew(running, "r", ["a"], rounds=2, members="lease_s = 86400")
    play_rounds(running, [a], range(1))
    clock.advance(EVERY_S)
    assert await_backup(running, first) == first + EVERY_S + 1
    assert damages(DirectoryBackups(tmp_path / "backups")) == {2: "", 1: ""}
    restore(DirectoryBackups(tmp_path / "backups"), 2, Target(tmp_path / "new"))
    check_restored(tmp_path / "new", tmp_path / "backups", 2)


@pytest.mark.covers("security:clock-set")
def test_where_the_clock_was_set_back_they_go_on(
    running: InThread, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None was made until the clock had come to the last one again, and nothing said so."""
    first = await_backup(running, None)
    await_rest(running)
    set_now(running, monkeypatch, first - 86_400)
    clock.advance(EVERY_S)
    assert await_backup(running, first) == first - 86_400
    await_rest(running)
    set_now(running, monkeypatch, first - 86_400 - 5)
    clock.advance(RETRY_S)
    running.coordinator.tick()
    assert running.coordinator.last_backup_at == first - 86_400, "by some seconds it is still new enough"


def test_a_restarted_coordinator_knows_of_the_last_one_and_makes_none_before_its_time(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"backup_dir": tmp_path / "backups", "backup_every_s": EVERY_S}
    with coordinator_thread(tmp_path / "data", **settings) as running:
        made_at = await_backup(running, None)
    with coordinator_thread(tmp_path / "data", **settings) as running:
        assert await_backup(running, None) == made_at
        await_rest(running)
    assert numbers(tmp_path) == [1]


@pytest.mark.in_sqlite
def test_one_that_the_command_has_made_counts(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data"):
        pass
    made = back_up(tmp_path / "data", tmp_path / "backups")
    with coordinator_thread(tmp_path / "data", backup_dir=tmp_path / "backups") as running:
        assert await_backup(running, None) == made.made_at
    assert numbers(tmp_path) == [1]


@pytest.mark.slow
def test_a_failure_is_told_with_what_to_do_and_tried_again(
    tmp_path: Path, clock: SettableClock, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "backups"
    root.mkdir()
    (root / "letter").touch()
    with (
        caplog.at_level(logging.ERROR, "coordinator.backup"),
        coordinator_thread(tmp_path / "data", clock=clock, backup_dir=root) as running,
    ):
        crew(running, "r", ["a"], rounds=2)
        wait_until(lambda: len(events(running, "r", "backup-failed")) == 1)
        (failed,) = events(running, "r", "backup-failed")
        assert "backups has other files than backups" in failed["message"]
        assert "has other files than backups" in caplog.text
        assert httpx.get(f"{running.url}/readyz").status_code == 200
        assert running.coordinator.last_backup_at is None
        (root / "letter").unlink()
        await_rest(running)
        clock.advance(RETRY_S)
        await_backup(running, None)
        wait_until(lambda: len(events(running, "r", "backup-made")) == 1)
        assert len(events(running, "r", "backup-failed")) == 1, "told once"


@pytest.mark.slow
def test_it_waits_for_nobody_and_nobody_for_it(tmp_path: Path, clock: SettableClock) -> None:
    """A disk from which nothing comes holds up neither a round nor the end of the coordinator."""
    root = tmp_path / "backups"
    with coordinator_thread(tmp_path / "data", clock=clock, backup_dir=root, backup_every_s=EVERY_S) as running:
        await_backup(running, None)
        await_rest(running)
        (a,) = crew(running, "r", ["a"], rounds=2, members="lease_s = 86400")
        context, reached = running.live("r").context, threading.Event()

        def stuck(name: str) -> Reader:
            reached.set()
            context.closing.wait()
            return context.blobs.open(name)

        scheduled = scheduled_of(running)
        make = scheduled.make
        assert isinstance(make, partial)
        source, *rest = make.args
        assert isinstance(source, BackupSource)
        scheduled.make = partial(make.func, replace(source, open_blob=stuck), *rest)
        shutil.rmtree(root)
        clock.advance(EVERY_S)
        assert reached.wait(PATIENCE_S)
        play_rounds(running, [a], range(2))
        assert httpx.get(f"{running.url}/readyz").status_code == 200
    assert numbers(tmp_path) == []


def test_backups_within_the_data_directory_are_refused(tmp_path: Path) -> None:
    for root in (tmp_path / "data" / "backups", tmp_path / "data", tmp_path):
        with pytest.raises(OuterstepError, match="overlap"):
            Coordinator(Settings(data_dir=tmp_path / "data", backup_dir=root))
