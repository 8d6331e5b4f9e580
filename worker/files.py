"""Crash-safe files: locks that end with their process, durable directories, atomic replacement."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from outerstep.common.direct_io import Writer

NEW = ".new"  # suffix of the temporary file that replaces another


def lock_now(file: IO[Any] | int) -> bool:
    """Lock an open file or directory until it is closed; return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, write: Callable[[Writer], object], mode: int = 0o666) -> None:
    """Replace the file's content by what `write` writes, durably: after a crash it is entirely the old or the new one.

    `mode` applies to a new file, less the umask. Raises OSError.
    """
    temporary = path.with_name(path.name + NEW)
    with Writer(temporary, mode) as file:
        write(file)
        file.end()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)
