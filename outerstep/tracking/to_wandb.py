"""Tracks into Weights & Biases: one W&B run per run; the step is the round.

It uses W&B's settings: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline. The W&B run's id is derived from our run, so a
tracker that is started again, here or on another machine, continues it.
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
    """A tracker. `first` is the next round to write, according to W&B or, offline, to our own file.

    Raises OuterstepError if W&B refuses or the directory is in use, and OSError.
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
                # No metrics of this machine, which is not part of the run.
                settings=wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True),
            )
        except wandb.errors.Error as error:
            raise OuterstepError(
                f"wandb: {error}; run `wandb login`, or set WANDB_MODE=offline to write only to {out}"
            ) from error
        self.first = max(self._run.step, self._position.first)

    def write(self, record: Record) -> None:
        events = {"events": "\n".join(map(event_line, record.events))} if record.events else {}
        self._run.log({**record.figures, **events}, step=record.round, commit=True)
        self._position.save(record.round + 1)

    def close(self) -> None:
        self._run.finish()
        self._position.close()
