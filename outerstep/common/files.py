"""Files that survive a crash or a kill: locks, fsync, atomic replacement, and writes past the page cache. And errors
that name the file.

Direct I/O is used where the file system supports it: a new page in the page cache costs more than everything else that
happens to its bytes (docs/log.md), and the writer keeps them in memory for as long as they are read anyway.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self
from weakref import WeakSet

import numpy as np

from outerstep.common.quantities import bytes_text
from protocol.digest import Buffer
from protocol.errors import OuterstepError

PAGE_BYTES = 4096
LEAST_BYTES = 1 << 20  # smaller writes are not worth two waits for the disk, one for the bytes and one for the fsync
NEW = ".new"  # suffix of a file that will replace the one without it
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux


# --- errors -------------------------------------------------------------------------------------------------------

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # no room on the disk, or none left of the user's quota


_IN_RUST = re.compile(r"\(os error (\d+)\)")  # in the errors of libraries that are no OSError: safetensors, tokenizers


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file `path` in an OSError of the block that names none: those of open files, such as of writes. Raise
    the system's errors in libraries in Rust as OSError."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except Exception as error:
        if (found := _IN_RUST.search(str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def check_room(path: Path, needed_bytes: int) -> None:
    """Raise OSError if the disk of `path` has less room than this."""
    if free_bytes(path) < needed_bytes:
        message = f"{os.strerror(errno.ENOSPC)} for {bytes_text(needed_bytes)}"
        raise OSError(errno.ENOSPC, message, str(path))


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the disk of `path`, which need not exist. Raises OSError."""
    found = os.statvfs(next(each for each in (path, *path.absolute().parents) if each.exists()))
    return found.f_bavail * found.f_frsize


# --- locks --------------------------------------------------------------------------------------------------------


_LOCKED: WeakSet[IO[Any]] = WeakSet()  # the files that this process has locked, if they are still open


def try_lock(file: IO[Any] | int) -> bool:
    """Lock an open file or directory until it is closed or the process ends. Return False if another process holds the
    lock.

    A forked child, such as a DataLoader's, does not hold the lock of a file, but does hold that of a descriptor.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not isinstance(file, int):
        _LOCKED.add(file)
    return True


def _drop_locks_of_parent() -> None:
    """Let go of the parent's locks after a fork: a child that outlives a killed parent would still hold them."""
    for file in _LOCKED:
        if not file.closed:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the file keeps a descriptor, which it will close
            os.dup2(nowhere, file.fileno(), inheritable=False)
            os.close(nowhere)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_drop_locks_of_parent)


def open_locked(path: Path, refusal: str) -> IO[str]:
    """Open `path`, create it if it is missing, and lock it as `try_lock` does.

    Raises OuterstepError with the message `refusal` if another process holds the lock, and OSError.
    """
    file = path.open("w")
    if not try_lock(file):
        file.close()
        raise OuterstepError(refusal)
    return file


# --- durability ---------------------------------------------------------------------------------------------------


def fsync(path: Path) -> None:
    """Make a file's content or a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Sink(Protocol):
    """What is written to: a file, or a counter of bytes."""

    def write(self, data: Buffer) -> int: ...

    def flush(self) -> None: ...


def replace_file(path: Path, write: Callable[[Sink], object], mode: int = 0o666) -> None:
    """Replace the content of `path` with what `write` writes, durably. After a crash the file has either the old or the
    new content, complete.

    `mode` applies to a new file, minus the umask. Raises OSError, and then leaves nothing half-written.
    """
    temporary = path.with_name(path.name + NEW)
    # After a power failure in the middle of a rename, both names may lead to one file: do not overwrite that one.
    temporary.unlink(missing_ok=True)
    try:
        with naming(path), Writer(temporary, mode) as file:
            write(file)
            file.end()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)  # it would take the room that others need
        raise
    temporary.rename(path)
    fsync(path.parent)


class _Counter:
    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Buffer) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        pass


def size_of(write: Callable[[Sink], object]) -> int:
    """Return how many bytes `write` writes."""
    counter = _Counter()
    write(counter)
    return counter.bytes


UNFINISHED = ".unfinished"  # files of a directory that is being written


def check_new(directory: Path) -> None:
    """Raise FileExistsError unless `directory` is missing or empty, apart from what a killed process has left in it."""
    if directory.exists() and (not directory.is_dir() or any(each.name != UNFINISHED for each in directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory; choose another")


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory to write files into, which are moved into `directory` at the end of the block. If it raises,
    nothing of it is left. Raises FileExistsError as `check_new` does, and OSError."""
    check_new(directory)
    existed, unfinished = directory.exists(), directory / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with naming(directory):
            unfinished.mkdir(parents=True)
            yield unfinished
            for each in unfinished.iterdir():
                each.rename(directory / each.name)
            unfinished.rmdir()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not existed:
            with suppress(OSError):
                directory.rmdir()
        raise


# --- direct I/O ---------------------------------------------------------------------------------------------------


def aligned(size: int) -> memoryview:
    """Return `size` bytes of uninitialised memory aligned to a page, as direct I/O requires."""
    memory = np.empty(_whole_pages(size) + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory.data[start : start + size]


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def write_new(path: Path, content: Buffer) -> None:
    """Write a new file. If it is large and `content` is `aligned` memory, its whole pages are written by direct I/O.

    Raises FileExistsError if the file exists, OSError if the disk is full or broken.
    """
    view = memoryview(content)
    descriptor = _open(path, os.O_EXCL, 0o644, direct=len(view) >= LEAST_BYTES)
    try:
        with naming(path):
            _write(descriptor, view, 0)
    finally:
        os.close(descriptor)


class Writer:
    """Overwrites a file from its beginning by direct I/O through one small buffer. A context manager.

    Call `end` after the last write. Raises OSError if the disk is full or broken.
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
        """Do nothing: archive writers flush in the middle of a page, and `end` writes the rest."""

    def end(self) -> None:
        """Write the rest of the buffer. The file is then complete, but not yet durable."""
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
    path.unlink(missing_ok=True)  # some file systems create the file before they reject O_DIRECT
    return os.open(path, flags, mode)


def _write(descriptor: int, view: memoryview, start: int) -> None:
    """Write all of `view` at byte offset `start`, a multiple of PAGE_BYTES."""
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
