"""Writing past the page cache, where the file system can.

A page that the cache has never held costs more than all else that happens to the bytes in it (docs/log.md), and what is
written so is in memory for as long as anybody wants it.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Self

import numpy as np

from protocol.digest import Buffer

PAGE_BYTES = 4096
LEAST_BYTES = 1 << 20  # less is not worth waiting for the disk twice, for the bytes and for the fsync
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux


def aligned(size: int) -> memoryview:
    """Memory of `size` bytes, with anything in it, as `write_new` wants it."""
    memory = np.empty(_whole_pages(size) + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory.data[start : start + size]


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def write_new(path: Path, content: Buffer) -> None:
    """Write a new file. Of a large one, all but the last few bytes go straight from memory that `aligned` gave to the
    disk.

    FileExistsError where there is one; OSError where the disk is full or broken.
    """
    view = memoryview(content)
    descriptor = _open(path, os.O_EXCL, 0o644, direct=len(view) >= LEAST_BYTES)
    try:
        _write(descriptor, view, 0)
    finally:
        os.close(descriptor)


class Writer:
    """A file that takes what is written, from its beginning on, by way of one small piece of memory. A context manager;
    what is there already goes. OSError as `write_new`; `end` it before it is closed."""

    def __init__(self, path: Path, mode: int) -> None:
        self._descriptor = _open(path, os.O_TRUNC, mode, direct=True)
        self._memory = aligned(LEAST_BYTES)
        self._filled = self._written = 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            part = view[: len(self._memory) - self._filled]
            self._memory[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == len(self._memory):
                self._write_out()
        return size

    def flush(self) -> None:
        """For those who flush in the middle: nothing. `end` does it."""

    def end(self) -> None:
        """All of it is in the file now, and not yet durable."""
        _through_the_cache(self._descriptor)
        self._write_out()

    def fileno(self) -> int:
        return self._descriptor

    def _write_out(self) -> None:
        _write(self._descriptor, self._memory[: self._filled], self._written)
        self._written += self._filled
        self._filled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _open(path: Path, flags: int, mode: int, *, direct: bool) -> int:
    flags |= os.O_WRONLY | os.O_CREAT
    try:
        return os.open(path, flags | (_DIRECT if direct else 0), mode)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
    path.unlink(missing_ok=True)  # some file systems make it before they refuse
    return os.open(path, flags, mode)


def _write(descriptor: int, view: memoryview, start: int) -> None:
    """All of `view`, from byte `start` of the file on, which is a whole number of pages."""
    straight = len(view) // PAGE_BYTES * PAGE_BYTES
    at = 0
    while at < len(view):
        if at >= straight:
            _through_the_cache(descriptor)
        try:
            at += os.pwrite(descriptor, view[at : straight if at < straight else len(view)], start + at)
        except OSError as error:
            if error.errno != errno.EINVAL or not _through_the_cache(descriptor):
                raise


def _through_the_cache(descriptor: int) -> bool:
    """From here on; whether it was otherwise."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
