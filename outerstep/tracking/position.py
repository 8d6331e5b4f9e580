"""A tracker's output: locked by one process at a time, and how far tracking has come."""

import json
from pathlib import Path
from typing import IO, Any

from outerstep.common.files import replace_file, try_lock
from protocol.errors import OuterstepError


def lock(file: IO[Any]) -> None:
    """Lock the open file until it is closed. Raises OuterstepError if another process holds the lock."""
    if not try_lock(file):
        raise OuterstepError(f"{file.name} is in use by another `outerstep run track`; give another --out")


class Position:
    """A small file with the next round to track, for trackers that cannot be asked for it.

    Raises OuterstepError if it cannot be read, or if another process uses it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = path.with_suffix(".lock").open("w")
        lock(self._lock)
        self.first = 0
        if path.exists():
            try:
                self.first = int(json.loads(path.read_text())["first"])
            except (ValueError, KeyError, TypeError) as error:
                raise OuterstepError(
                    f"{path} is damaged; fix it, or delete it to track from the first round"
                ) from error

    def save(self, first: int) -> None:
        """Record, durably, that everything before round `first` is tracked."""
        replace_file(self._path, lambda file: file.write(json.dumps({"first": first}).encode()))

    def close(self) -> None:
        self._lock.close()
