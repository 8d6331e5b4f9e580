"""Direct I/O: writing files past the page cache, on file systems that can.

A new page in the cache costs more than all else that happens to the bytes in it (docs/log.md), and the writer still has
them in memory for as long as anybody reads them.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Self

import numpy as np

from protocol.digest import Buffer

PAGE_BYTES = 4096
LEAST_BYTES = 1 << 20  # less is not worth two waits for the disk, for the bytes and for the fsync
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux


def aligned(size: int) -> memoryview:
    """Return `size` bytes of uninitialised memory that begin on a page's boundary, as direct I/O needs."""
    memory = np.empty(_whole_pages(size) + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory.data[start : start + size]


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def write_new(path: Path, content: Buffer) -> None:
    """Write a new file. The whole pages of a large one go to the disk by direct I/O, if `content` is `aligned` memory.

    Raises FileExistsError for a file that exists, OSError for a disk that is full or broken.
    """
    view = memoryview(content)
    descriptor = _open(path, os.O_EXCL, 0o644, direct=len(view) >= LEAST_BYTES)
    try:
        _write(descriptor, view, 0)
    finally:
        os.close(descriptor)


class Writer:
    """A file that is overwritten from its beginning, by direct I/O, through one small buffer. A context manager.

    Call `end` after the last write. Raises OSError for a disk that is full or broken.
    """

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
        """Do nothing: writers of archives flush in the middle of a page; `end` writes the rest."""

    def end(self) -> None:
        """Write out what is still in the buffer. The file is complete then, and not yet durable."""
        _disable_direct(self._descriptor)
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
    """Write all of `view` at byte `start` of the file, a multiple of PAGE_BYTES."""
    whole_pages = len(view) // PAGE_BYTES * PAGE_BYTES
    at = 0
    while at < len(view):
        if at >= whole_pages:
            _disable_direct(descriptor)
        try:
            at += os.pwrite(descriptor, view[at : whole_pages if at < whole_pages else len(view)], start + at)
        except OSError as error:
            if error.errno != errno.EINVAL or not _disable_direct(descriptor):
                raise


def _disable_direct(descriptor: int) -> bool:
    """Write through the page cache from now on. Return True if direct I/O was on."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
