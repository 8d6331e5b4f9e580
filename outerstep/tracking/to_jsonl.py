"""Tracks into a file of JSON lines, without any library.

The first line identifies the run. Each record is its events followed by its round. If a kill left an incomplete record,
it is cut off when tracking continues, and written again.
"""

import json
import os
from pathlib import Path
from typing import Any

from outerstep.tracking.position import lock
from outerstep.tracking.records import Record
from protocol.errors import OuterstepError
from protocol.messages import RunDetail

_BEGINNING = b'{"kind": "run", "name": '
_CHOOSE = "choose another --out"


class Tracker:
    """A tracker. `first` is the next round to write. Raises OuterstepError for a file of another run or a file in use,
    and OSError."""

    def __init__(self, out: Path, name: str, run: RunDetail) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        self._file = out.open("ab+")
        lock(self._file)
        self._file.seek(0)
        end, self.first = self._complete(name)
        self._file.truncate(end)
        if end == 0:
            self._append([{"kind": "run", "name": name, "run": run.name, "spec": run.spec.model_dump(mode="json")}])

    def _complete(self, name: str) -> tuple[int, int]:
        """Return the end of the last complete record in bytes, and the round after it. Raises OuterstepError."""
        end = at = first = 0
        for number, line in enumerate(self._file):
            at += len(line)
            if number == 0 and not line.startswith(_BEGINNING[: len(line)]):
                raise OuterstepError(f"{self._file.name} was not written by `outerstep run track`; {_CHOOSE}")
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)
                kind, of = found["kind"], found.get("name")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise OuterstepError(f"{self._file.name}, line {number + 1}, is damaged; {_CHOOSE}") from error
            if kind == "run" and of != name:
                raise OuterstepError(f"{self._file.name} belongs to the run {of}, not to {name}; {_CHOOSE}")
            if kind == "round":
                first = found["round"] + 1
            if kind != "event":
                end = at
        return end, first

    def write(self, record: Record) -> None:
        events = [
            {"kind": "event", "event": event.kind, **event.model_dump(exclude={"kind"})} for event in record.events
        ]
        own = {"round": record.round, "at": record.at, "final": record.final, **record.figures}
        self._append([*events, {"kind": "round", **own}])

    def _append(self, lines: list[dict[str, Any]]) -> None:
        self._file.write("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
