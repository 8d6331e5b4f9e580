"""Blobs as files of the data directory.

A file is written or received elsewhere, fsynced, linked to its name, and its folder fsynced: a crash at any instant
leaves the whole blob or none. A link never replaces a file.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coordinator.store.blobs import DirectAccess, FileReader, OwnedBucket
from coordinator.store.data_directory import DataDirectory
from outerstep.common.files import fsync, write_new
from protocol.digest import Buffer


class DirectoryBlobs:
    """Blobs whose names are paths below the data directory. The methods are documented in `Blobs`."""

    direct: DirectAccess | None = None
    bucket: OwnedBucket | None = None

    def __init__(self, data: DataDirectory) -> None:
        self.root, self._scratch = data.root, data.scratch

        # Held while folders are made or removed. So a folder that exists while you hold it is not removed.
        self._folders = threading.Lock()
        # Only folders that this process made: an earlier process may have died before a folder was durable.
        self._durable_folders = {self.root}

    def put(self, name: str, source: Buffer | Path) -> bool:
        final = self.root / name
        with _file_of(source, self._scratch) as file:
            fsync(file)
            with self._folders:
                self._make_folder(final.parent)
                try:
                    os.link(file, final)
                    created = True
                except FileExistsError:  # it may not be durable yet, so fsync here too
                    created = False
        fsync(final.parent)
        return created

    def open(self, name: str, *, fresh: bool = False) -> FileReader:
        return FileReader(self.root / name)

    def fetch(self, name: str, target: Path) -> None:
        target.unlink(missing_ok=True)
        os.link(self.root / name, target)

    def rename(self, name: str, new_name: str) -> None:
        self.put(new_name, self.root / name)
        self.delete(name)

    def delete(self, *names: str) -> None:
        for name in names:
            path = self.root / name
            path.unlink(missing_ok=True)
            with self._folders, suppress(OSError):  # not empty, or gone
                path.parent.rmdir()
                self._durable_folders.discard(path.parent)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        for folder, _, names in os.walk(self.root / prefix, onerror=_raise_unless_missing):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield path.relative_to(self.root).as_posix(), path.stat().st_size

    def stat(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return None

    def _make_folder(self, folder: Path) -> None:
        """Create the folder and its parents, durably. Call it with `_folders` held."""
        if folder not in self._durable_folders:
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            fsync(folder.parent)
            self._durable_folders.add(folder)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _file_of(source: Buffer | Path, scratch: Callable[[], Path]) -> Iterator[Path]:
    """Give the block a local file with the content of `source`."""
    if isinstance(source, Path):
        yield source
        return
    file = scratch()
    try:
        write_new(file, source)
        yield file
    finally:
        file.unlink(missing_ok=True)
