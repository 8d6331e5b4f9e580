"""Local files: reading them, and making them durable."""

import os
from pathlib import Path
from typing import Self


class FileReader:
    """A local file that is open to be read, as a `Reader`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)  # an object, which is closed with the answer that nobody came for
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, memory: memoryview, at: int) -> int:
        return os.preadv(self._file.fileno(), [memory], at)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
