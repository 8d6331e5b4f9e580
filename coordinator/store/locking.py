"""Locks between processes: a file that at most one of them holds."""

import fcntl
from pathlib import Path
from typing import IO

from protocol.errors import OuterstepError


def hold(path: Path, refusal: str) -> IO[str]:
    """Return the open file `path`, made where missing, locked until it is closed or the process ends, however it does.

    Raises OuterstepError with `refusal` if another process holds it, and OSError.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise OuterstepError(refusal) from error
    return file
