"""Files that stand a kill: locks that end with their process, directories that are durable, content that is whole."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from outerstep.common.direct_io import Writer

NEW = ".new"  # ends the name of what is being written in a file's place


def lock_now(file: IO[Any] | int) -> bool:
    """Lock an open file or directory until it is closed; return False if another process has it locked."""
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
    """Give the file the content that `write` writes, durably: after a crash there is the old one or the new one, whole.

    `mode` is of a new file, less the umask. Raises OSError.
    """
    temporary = path.with_name(path.name + NEW)
    with Writer(temporary, mode) as file:
        write(file)
        file.end()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)
