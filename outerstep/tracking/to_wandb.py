"""Tracking into Weights & Biases: a run of theirs for a run of ours, whose step is the round.

Its settings are theirs: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline. Their id of the run is ours, so that a tracker
that is started again, here or on another machine, goes on with it.
"""

import os
from pathlib import Path

import wandb

from outerstep.display import event_line
from outerstep.tracking.position import Position
from outerstep.tracking.records import Record
from protocol.errors import OuterstepError
from protocol.messages import RunDetail

PROJECT = "outerstep"


class Tracker:
    """A tracker. `first` is the round that it has not got yet: by what W&B says or, offline, by a file of ours.

    Raises OuterstepError if W&B refuses, or for a directory in use, and OSError.
    """

    def __init__(self, out: Path, name: str, run: RunDetail) -> None:
        self._position = Position(out / f"{name}.json")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=name,
                name=run.name,
                resume="allow",
                dir=str(out),
                config=run.spec.model_dump(mode="json"),
                # Nothing of this machine, which is none of the run's.
                settings=wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True),
            )
        except wandb.errors.Error as error:
            raise OuterstepError(
                f"wandb: {error}; run `wandb login`, or set WANDB_MODE=offline to write to {out} alone"
            ) from error
        self.first = max(self._run.step, self._position.first)

    def write(self, record: Record) -> None:
        events = {"events": "\n".join(map(event_line, record.events))} if record.events else {}
        self._run.log({**record.figures, **events}, step=record.round, commit=True)
        self._position.save(record.round + 1)

    def close(self) -> None:
        self._run.finish()
        self._position.close()
