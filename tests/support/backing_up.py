"""Backups for tests, made and restored as the commands do it."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.backup.contents import Blob, DamagedBackup, Manifest, blobs_of, content_of
from coordinator.backup.directory import BackupSource, DirectoryBackups
from coordinator.backup.restore import Backups, Target, new_admin_token, restore
from coordinator.store import sqlite
from coordinator.store.blobs import Reader
from coordinator.store.data_directory import DataDirectory
from coordinator.store.opening import reader_of


def back_up(
    data_dir: Path, place: Path, keep: int = 7, before_opening: Callable[[str], object] = lambda _: None
) -> Manifest:
    """Back up a data directory, whoever uses it; `before_opening` is called with the name of each blob that is
    copied."""
    open_blob = reader_of(data_dir, sqlite.url_in(data_dir))

    def opening(name: str) -> Reader:
        before_opening(name)
        return open_blob(name)

    return DirectoryBackups(place).make(BackupSource(sqlite.url_in(data_dir), opening), keep)


def restored(place: Path, data_dir: Path, number: int | None = None) -> Manifest:
    """Restore a backup, with a new admin token."""
    manifest = restore(DirectoryBackups(place), number, Target(data_dir))
    new_admin_token(Target(data_dir))
    return manifest


def damages(backups: Backups) -> dict[int, str]:
    """What keeps each backup from being restored, by number: every one is fetched. The owner of a bucket stays."""
    found = {}
    for number in backups.numbers():
        found[number] = ""
        with TemporaryDirectory() as folder, closing(DataDirectory(Path(folder))) as data:
            try:
                with backups.fetched(backups.manifest(number), data, None):
                    raise _Fetched
            except DamagedBackup as damage:
                found[number] = str(damage)
            except _Fetched:
                pass
    return found


class _Fetched(Exception):
    """Ends a restore that has fetched everything."""


def blobs_in(folder: Path) -> list[Blob]:
    """The blobs that the backup in a folder needs, by its database."""
    number = int(folder.name)
    with TemporaryDirectory() as scratch:
        copied = Path(scratch, "database")
        copied.write_bytes((folder / sqlite.FILE).read_bytes())
        return blobs_of(DirectoryBackups(folder.parent).manifest(number), copied)


def files_in(folder: Path) -> set[str]:
    """The names of the files of blobs in a data directory, in which no coordinator has been yet, or in a backup."""
    return {path.relative_to(folder).as_posix() for path in (folder / "runs").rglob("*") if path.is_file()}


def check_restored(data_dir: Path, place: Path, number: int) -> None:
    """The data directory, in which no coordinator has been yet, has the database and the blobs of the backup, and no
    others."""
    folder = place / str(number)
    assert _dump(data_dir / sqlite.FILE) == _dump(folder / sqlite.FILE)
    blobs = blobs_in(folder)
    assert files_in(data_dir) == {blob.name for blob in blobs}
    for blob in blobs:
        content = content_of(data_dir / blob.name)
        assert (content.digest, content.size) == (blob.digest, blob.size)


def _dump(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())


def round_in(database: Path, run: str) -> int:
    """The round that a database knows."""
    with sqlite3.connect(database) as connection:
        return int(connection.execute("SELECT round FROM runs WHERE name = ?", [run]).fetchone()[0])
