"""Backups for tests, made and restored as the commands do it."""

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coordinator.backup.contents import is_whole
from coordinator.backup.create import BackupSource, CreatedBackup, create
from coordinator.backup.directory import BackupDirectory
from coordinator.backup.manifest import Content, Manifest
from coordinator.backup.restore import BackupChecker, Target, new_admin_token, restore
from coordinator.store import sqlite
from coordinator.store.blobs import FileReader, Reader
from coordinator.store.opening import reader_of


def back_up(
    data_dir: Path, place: Path, keep: int = 7, before_opening: Callable[[str], object] = lambda _: None
) -> CreatedBackup:
    """Back up a data directory, whoever uses it; `before_opening` is called with the name of each blob."""
    open_blob = reader_of(data_dir, sqlite.url_in(data_dir))

    def opening(name: str) -> Reader:
        before_opening(name)
        return open_blob(name)

    return create(BackupSource(sqlite.url_in(data_dir), opening), BackupDirectory(place), keep)


def restored(place: Path, data_dir: Path, number: int | None = None) -> Manifest:
    """Restore a backup, with a new admin token."""
    manifest = restore(BackupDirectory(place), number, Target(data_dir))
    new_admin_token(Target(data_dir))
    return manifest


def damages(place: Path) -> dict[int, str]:
    """What is wrong with each backup, by number."""
    return {info.number: info.damage for info in BackupChecker(BackupDirectory(place)).infos()}


def blobs_in(root: Path) -> set[str]:
    """The names of the files of blobs."""
    return {path.name for path in (root / "blobs").iterdir()}


def check_restored(data_dir: Path, manifest: Manifest) -> None:
    """The data directory, in which no coordinator has been yet, has the database and the blobs of the backup, and no
    others."""
    assert _is(data_dir / sqlite.FILE, manifest.database)
    found = {path.relative_to(data_dir).as_posix() for path in (data_dir / "runs").rglob("*") if path.is_file()}
    assert found == {blob.name for blob in manifest.blobs}
    assert all(_is(data_dir / blob.name, blob) for blob in manifest.blobs)


def _is(path: Path, content: Content) -> bool:
    return is_whole(partial(FileReader, path), content)


def round_in(database: Path, run: str) -> int:
    """The round that a database knows."""
    with sqlite3.connect(database) as connection:
        return int(connection.execute("SELECT round FROM runs WHERE name = ?", [run]).fetchone()[0])
