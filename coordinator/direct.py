"""Writing past the page cache, where the file system can.

A page that the cache has never held costs more than all else that happens to the bytes in it (docs/log.md), and what is
written so is in memory for as long as anybody wants it.
"""

import errno
import fcntl
import os
from pathlib import Path

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
    descriptor = _open(path, _DIRECT if len(view) >= LEAST_BYTES else 0)
    try:
        straight = len(view) // PAGE_BYTES * PAGE_BYTES
        at = 0
        while at < len(view):
            if at >= straight:
                _through_the_cache(descriptor)
            try:
                at += os.pwrite(descriptor, view[at : straight if at < straight else len(view)], at)
            except OSError as error:
                if error.errno != errno.EINVAL or not _through_the_cache(descriptor):
                    raise
    finally:
        os.close(descriptor)


def _open(path: Path, direct: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | direct, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
    path.unlink(missing_ok=True)  # some file systems make it before they refuse
    return os.open(path, flags, 0o644)


def _through_the_cache(descriptor: int) -> bool:
    """From here on; whether it was otherwise."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
