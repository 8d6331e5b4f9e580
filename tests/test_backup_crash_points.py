"""kill -9 of `outerstep coordinator backup` and `restore` before and after each fsync, rename, link and removal: the
backup of before is whole, and the same command again goes on.

As in `test_crash_points.py`, the points are those that an undisturbed command passes.
"""

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from coordinator.backup.directory import DirectoryBackups
from coordinator.backup.restore import Target, restore
from coordinator.store.database import url_of
from coordinator.store.sqlite import FILE
from harness.coordinator import coordinator_thread
from tests.coordinator.crew import crew, play_round
from tests.support import crash_points
from tests.support.backing_up import back_up, blobs_in, check_restored, damages, files_in
from tests.support.crash_points import forked
from tests.support.crashing import run_backup, run_restore
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.system

# What at least must be among the points of a backup, and of a restore.
OF_BACKUP = {
    "fsync unfinished/copied in contents.copy_whole",
    "rename to unfinished/runs/r/deltas/N/N.D in directory.make",
    "rename to unfinished/manifest.json in directory.make",
    "fsync unfinished in directory.make",
    "rename to N in directory.make",
    "fsync . in directory.make",
    "rename to removed in directory.make",
}
OF_RESTORE = {
    "rename to restored in restore.restore",
    "fsync incoming/N in contents.copy_whole",
    "link checkpoints/N/N.D in directory.fetched",
    "link deltas/N/N.D in directory.fetched",
    "fsync checkpoints/N in directory.fetched",
    "rename to outerstep.db in restore.restore",
    "fsync . in restore.restore",
}


class Prepared(NamedTuple):
    """A data directory, and a directory with one backup of an earlier state of it."""

    data: Path
    backups: Path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("prepared")
    with coordinator_thread(folder / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=4, checkpoints="every_rounds = 1\nkeep = 1")
        play_round([a], 0)
        running.await_state("r", 1)
        back_up(running.data_dir, folder / "backups")
        for round_ in range(1, 3):
            play_round([a], round_)
        running.await_state("r", 3)
    return Prepared(folder / "data", folder / "backups")


def passed(folder: Path, at_least: set[str]) -> Counter[str]:
    """The points that an undisturbed command has passed, and how often."""
    points = Counter(crash_points.trace(folder))
    assert {point.partition(" ")[2] for point in points} >= at_least
    return points


def killed(folder: Path, point: str, count: int, command: object, *paths: Path) -> None:
    """Run the command until it passes `point` for the `count`-th time, and has died of it."""
    folder.mkdir()
    crash_points.arm(folder, point, count, point)
    process = forked(command, folder, *paths)  # type: ignore[arg-type]
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL, (point, (folder / "log").read_text())


@pytest.mark.covers("reliability:backup-killed")
def test_a_backup_killed_at_each_point_leaves_a_whole_one_and_the_next_goes_on(
    prepared: Prepared, tmp_path: Path
) -> None:
    shutil.copytree(prepared.backups, tmp_path / "undisturbed")
    (tmp_path / "first").mkdir()
    process = forked(run_backup, tmp_path / "first", prepared.data, tmp_path / "undisturbed")
    process.join(PATIENCE_S)
    assert process.exitcode == 0, (tmp_path / "first" / "log").read_text()
    wanted = files_in(tmp_path / "undisturbed" / "2")
    for index, (point, count) in enumerate(passed(tmp_path / "first", OF_BACKUP).items()):
        root = tmp_path / f"backups-{index}"
        shutil.copytree(prepared.backups, root)
        killed(tmp_path / str(index), point, (count + 1) // 2, run_backup, prepared.data, root)
        number = max(DirectoryBackups(root).numbers())
        new = tmp_path / f"new-{index}"
        assert restore(DirectoryBackups(root), None, Target(new)).number == number, point
        check_restored(new, root, number)
        made = back_up(prepared.data, root, keep=1)
        assert damages(DirectoryBackups(root)) == {made.number: ""}, point
        assert {path.name for path in root.iterdir()} == {str(made.number), "lock"}, point
        assert files_in(root / str(made.number)) == wanted == {blob.name for blob in blobs_in(root / str(made.number))}
        assert made.number in (2, 3), "what was killed may have become one"
        for folder in (root, new):
            shutil.rmtree(folder)


@pytest.mark.covers("reliability:backup-killed")
def test_a_restore_killed_at_each_point_is_done_again(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    process = forked(run_restore, tmp_path / "first", prepared.backups, tmp_path / "undisturbed")
    process.join(PATIENCE_S)
    assert process.exitcode == 0, (tmp_path / "first" / "log").read_text()
    for index, (point, count) in enumerate(passed(tmp_path / "first", OF_RESTORE).items()):
        new = tmp_path / f"new-{index}"
        killed(tmp_path / str(index), point, (count + 1) // 2, run_restore, prepared.backups, new)
        manifest = DirectoryBackups(prepared.backups).manifest(1)
        if not (new / FILE).exists():
            if (new / "restored").exists():
                with pytest.raises(ValueError, match="is incomplete"):
                    url_of(None, new)
            assert restore(DirectoryBackups(prepared.backups), None, Target(new)) == manifest, point
        check_restored(new, prepared.backups, 1)
        shutil.rmtree(new)
