"""Arrays in a file that is mapped into memory: they take memory only while they are used, and stay in the page cache
while there is room."""

import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Self, cast

import torch
from torch import Tensor

from outerstep.common import files
from protocol.digest import Buffer

_F32 = 4  # bytes
_MADV_POPULATE_WRITE = 23  # Python has no name for it


class MappedArrays:
    """Arrays of float32 in one file, each from a page boundary on: `values[i]` has `sizes[i]` elements. One mapping has
    all of them, because each mapping takes a file descriptor. `path`: what errors name. Raises ValueError if `file` is
    of another size."""

    def __init__(self, file: BinaryIO, sizes: Sequence[int], path: Path) -> None:
        self._path = path
        self._room = _room(sizes)
        *self._starts, size = accumulate(self._room, initial=0)
        self._file = file
        if os.fstat(file.fileno()).st_size != size:
            raise ValueError(f"it is not {size} bytes long")
        self._pages = mmap.mmap(file.fileno(), size) if size else None
        self.values = [self._array(start, n) for start, n in zip(self._starts, sizes, strict=True)]

    @classmethod
    def without_a_name(cls, directory: Path, sizes: Sequence[int]) -> Self:
        """Return arrays of zeros that end with the process. Raises OSError if they do not fit on the disk: later, that
        would kill the process."""
        file = cast(BinaryIO, tempfile.TemporaryFile(dir=directory, buffering=0))  # noqa: SIM115
        _allocate(file, sum(_room(sizes)), directory)
        return cls(file, sizes, directory)

    @classmethod
    def kept(cls, path: Path, sizes: Sequence[int]) -> Self:
        """Return the arrays in the file at `path`. If it is missing or of another size, a new one replaces it. Raises
        OSError as above."""
        size = sum(_room(sizes))
        try:
            if path.stat().st_size != size:
                path.unlink()
        except FileNotFoundError:
            pass
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        file = cast(BinaryIO, os.fdopen(descriptor, "r+b", buffering=0))
        _allocate(file, size, path)
        files.fsync(path.parent)
        return cls(file, sizes, path)

    @classmethod
    def existing(cls, path: Path, sizes: Sequence[int]) -> Self:
        """Return the arrays in the file at `path`. Raises OSError, and ValueError if it is of another size."""
        return cls(cast(BinaryIO, path.open("r+b", buffering=0)), sizes, path)

    def _array(self, start: int, n: int) -> Tensor:
        if self._pages is None or not n:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return torch.frombuffer(self._pages, dtype=torch.float32, count=n, offset=start)

    def write(self, index: int, start: int, data: Buffer) -> None:
        """Write `data` into array `index` from element `start` on. Unlike a write to mapped memory, this does not read
        the pages that it replaces. Raises OSError."""
        view, at = memoryview(data).cast("B"), self._starts[index] + _F32 * start
        while view:
            with files.naming(self._path):
                written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written

    def sync(self) -> None:
        """Make the arrays durable. Raises OSError."""
        with files.naming(self._path):
            os.fdatasync(self._file.fileno())

    def populate(self, index: int) -> None:
        """Map the pages of an array for writing, all at once: one by one, it takes several times as long."""
        with suppress(OSError):  # Linux before 5.14: they are mapped as they are written
            self._advise(_MADV_POPULATE_WRITE, index)

    def release(self, index: int) -> None:
        """Give back the memory of an array: its next use reads it again."""
        self._advise(mmap.MADV_DONTNEED, index)

    def _advise(self, advice: int, index: int) -> None:
        if self._pages is not None and self._room[index]:
            self._pages.madvise(advice, self._starts[index], self._room[index])


def _room(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of each array, in whole pages."""
    unit = mmap.ALLOCATIONGRANULARITY
    return [-(-_F32 * n // unit) * unit for n in sizes]


def _allocate(file: BinaryIO, size: int, path: Path) -> None:
    files.check_room(path, size - 512 * os.fstat(file.fileno()).st_blocks)
    if size:
        with files.naming(path):
            os.posix_fallocate(file.fileno(), 0, size)
