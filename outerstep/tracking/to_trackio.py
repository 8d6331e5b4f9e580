"""Tracks into Trackio; the step is the round.

It uses Trackio's settings: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL. Trackio writes from a separate thread,
for which only `finish` waits; so each record is a short session, which the next one resumes.
"""

from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path

import trackio

from outerstep.display import event_line
from outerstep.tracking.position import Position
from outerstep.tracking.records import Record
from protocol.errors import OuterstepError
from protocol.messages import RunDetail

PROJECT = "outerstep"


class Tracker:
    """A tracker. `first` is the next round to write, from our own file. Raises OuterstepError if Trackio refuses or the
    directory is in use, and OSError."""

    def __init__(self, out: Path, name: str, run: RunDetail) -> None:
        self._position = Position(out / f"{name}.json")
        self._name, self._config = name, run.spec.model_dump(mode="json")
        self._announced = False
        self.first = self._position.first

    def write(self, record: Record) -> None:
        events = {"events": "\n".join(map(event_line, record.events))} if record.events else {}
        with ExitStack() as quiet:
            if self._announced:  # Trackio prints how to view the run; once is enough
                quiet.enter_context(redirect_stdout(StringIO()))
            run = self._session()
            run.log({**record.figures, **events}, step=record.round)
            run.finish()
        self._announced = True
        self._position.save(record.round + 1)

    def _session(self) -> trackio.Run:
        try:
            return trackio.init(
                project=PROJECT,
                name=self._name,
                config=self._config,
                resume="allow",
                embed=False,
                # No metrics of this machine, which is not part of the run.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except (ValueError, OSError) as error:
            raise OuterstepError(f"trackio: {error}") from error

    def close(self) -> None:
        self._position.close()
