"""The place where a tracker writes: one process at a time, and how far it came."""

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from protocol.errors import OuterstepError


def hold(file: IO[Any]) -> None:
    """Lock the open file until it is closed. Raises OuterstepError if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OuterstepError(f"{file.name} is in use by another `outerstep run track`; give another --out") from error


class Position:
    """A small file that says which round is to be tracked next, for trackers that cannot be asked.

    Raises OuterstepError if it cannot be read, or if another process uses it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = path.with_suffix(".lock").open("w")
        hold(self._lock)
        self.first = 0
        if path.exists():
            try:
                self.first = int(json.loads(path.read_text())["first"])
            except (ValueError, KeyError, TypeError) as error:
                raise OuterstepError(f"{path} does not say how far the tracking came; delete it, or mend it") from error

    def save(self, first: int) -> None:
        """Note, durably, that everything before round `first` is tracked."""
        new = self._path.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"first": first}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    def close(self) -> None:
        self._lock.close()
