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

from coordinator.backup.directory import BackupDirectory
from coordinator.backup.restore import Target, restore
from coordinator.store.database import url_of
from coordinator.store.sqlite import FILE
from harness.coordinator import coordinator_thread
from tests.coordinator.crew import crew, play_round
from tests.support import crash_points
from tests.support.backing_up import back_up, blobs_in, check_restored, damages
from tests.support.crash_points import forked
from tests.support.crashing import run_backup, run_restore
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.system

# What at least must be among the points of a backup, and of a restore.
OF_BACKUP = {
    "fsync incoming/N in contents.copy_whole",
    "rename to blobs/D in directory.take_blob",
    "fsync blobs in directory.add",
    "rename to backups/N.db in directory.add",
    "rename to backups/N.json in directory.add",
    "fsync backups in directory.add",
    "remove backups/N.json in directory.remove",
    "remove backups/N.db in directory.remove_databases_but",
    "remove blobs/D in directory.remove_blobs",
}
OF_RESTORE = {
    "rename to restored in restore.restore",
    "fsync incoming/N in contents.copy_whole",
    "link checkpoints/N/N.D in restore.restore",
    "link deltas/N/N.D in restore.restore",
    "fsync checkpoints/N in restore.restore",
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
    wanted = blobs_in(tmp_path / "undisturbed")
    for index, (point, count) in enumerate(passed(tmp_path / "first", OF_BACKUP).items()):
        root = tmp_path / f"backups-{index}"
        shutil.copytree(prepared.backups, root)
        killed(tmp_path / str(index), point, (count + 1) // 2, run_backup, prepared.data, root)
        found = damages(root)
        assert found, point
        assert set(found.values()) == {""}, point
        new = tmp_path / f"new-{index}"
        check_restored(new, restore(BackupDirectory(root), None, Target(new)))
        made = back_up(prepared.data, root, keep=1)
        assert damages(root) == {made.manifest.number: ""}, point
        assert blobs_in(root) == wanted, point
        assert made.manifest.number in (2, 3), "what was killed may have become one"
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
        manifest = BackupDirectory(prepared.backups).manifest(1)
        if not (new / FILE).exists():
            if (new / "restored").exists():
                with pytest.raises(ValueError, match="is incomplete"):
                    url_of(None, new)
            assert restore(BackupDirectory(prepared.backups), None, Target(new)) == manifest, point
        check_restored(new, manifest)
        shutil.rmtree(new)
