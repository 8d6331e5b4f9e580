"""Tracks into TensorBoard event files, in a directory for the run.

A record is one entry of a file, so after a kill it is either complete or missing; the files are read back to find the
last one. Events are texts.
"""

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event as Entry
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from outerstep.display import event_line
from outerstep.tracking.position import lock
from outerstep.tracking.records import Record
from protocol.messages import RunDetail


class Tracker:
    """A tracker. `first` is the next round to write. Raises OuterstepError if the directory is in use, and OSError."""

    def __init__(self, out: Path, name: str, run: RunDetail) -> None:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        lock(self._lock)
        self.first = 1 + max((step for path in sorted(folder.glob("*tfevents*")) for step in _steps(path)), default=-1)
        self._writer = EventFileWriter(str(folder))

    def write(self, record: Record) -> None:
        values = [value for name, figure in record.figures.items() for value in scalar_pb(name, figure).value]
        if record.events:
            texts = "\n\n".join(event_line(event) for event in record.events)
            values += text_pb("events", texts).value
        entry = Entry(step=record.round, wall_time=record.at, summary=Summary(value=values))
        self._writer.add_event(entry)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        self._lock.close()


def _steps(path: Path) -> list[int]:
    """Return the steps of the records in a file."""
    return [entry.step for entry in EventFileLoader(str(path)).Load() if entry.summary.value]
