"""Tracking into a file of JSON lines, which needs no library.

The first line says which run it is; then each record is its events and, last, its round. What a kill has left of a
record is cut off when the tracking goes on, and the record written again.
"""

import json
import os
from pathlib import Path
from typing import Any

from outerstep.tracking.place import hold
from outerstep.tracking.records import Record
from protocol.errors import OuterstepError
from protocol.messages import RunDetail

_BEGINNING = b'{"kind": "run", "name": '
_CHOOSE = "choose another --out"


class Tracker:
    """A tracker. `first` is the round that it has not got yet. Raises OuterstepError for a file of another run, or in
    use, and OSError."""

    def __init__(self, out: Path, name: str, run: RunDetail) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        self._file = out.open("ab+")
        hold(self._file)
        self._file.seek(0)
        end, self.first = self._complete(name)
        self._file.truncate(end)
        if end == 0:
            self._append([{"kind": "run", "name": name, "run": run.name, "spec": run.spec.model_dump(mode="json")}])

    def _complete(self, name: str) -> tuple[int, int]:
        """Return where the last complete record ends, and the round after it. Raises OuterstepError."""
        end = at = first = 0
        for number, line in enumerate(self._file):
            at += len(line)
            if number == 0 and not line.startswith(_BEGINNING[: len(line)]):
                raise OuterstepError(f"{self._file.name} is of no tracked run; {_CHOOSE}")
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)
                kind, of = found["kind"], found.get("name")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise OuterstepError(f"{self._file.name}, line {number + 1}, is damaged; {_CHOOSE}") from error
            if kind == "run" and of != name:
                raise OuterstepError(f"{self._file.name} is of the run {of}, not of {name}; {_CHOOSE}")
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
