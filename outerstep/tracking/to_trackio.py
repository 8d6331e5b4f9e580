"""Tracking into Trackio, whose step is the round.

Its settings are theirs: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL. It writes from a thread of its own, and only
`finish` waits for that; so each record is a short session, which is resumed for the next.
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
    """A tracker. `first` is the round that it has not got yet, by a file of ours. Raises OuterstepError if Trackio
    refuses, or for a directory in use, and OSError."""

    def __init__(self, out: Path, name: str, run: RunDetail) -> None:
        self._position = Position(out / f"{name}.json")
        self._name, self._config = name, run.spec.model_dump(mode="json")
        self._told = False
        self.first = self._position.first

    def write(self, record: Record) -> None:
        events = {"events": "\n".join(map(event_line, record.events))} if record.events else {}
        with ExitStack() as quiet:
            if self._told:  # how to see it; once is enough
                quiet.enter_context(redirect_stdout(StringIO()))
            run = self._session()
            run.log({**record.figures, **events}, step=record.round)
            run.finish()
        self._told = True
        self._position.save(record.round + 1)

    def _session(self) -> trackio.Run:
        try:
            return trackio.init(
                project=PROJECT,
                name=self._name,
                config=self._config,
                resume="allow",
                embed=False,
                # Nothing of this machine, which is none of the run's.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except (ValueError, OSError) as error:
            raise OuterstepError(f"trackio: {error}") from error

    def close(self) -> None:
        self._position.close()
