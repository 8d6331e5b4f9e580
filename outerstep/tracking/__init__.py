"""Tracking of a run from outside: its rounds and events go into a tracker of the user's, and neither coordinator nor
workers know of it.

Each of TRACKERS is a module with a class `Tracker`: made of a path, the name under which the run is tracked and the
run, it reads back how far it came, writes records and is closed.
"""

from typing import Literal, NamedTuple, get_args

TrackerName = Literal["jsonl", "tensorboard", "trackio", "wandb"]


class Kind(NamedTuple):
    """A tracker's module, the extra that it needs (None: nothing), and where it writes unless it is told."""

    module: str
    extra: str | None
    out: str


TRACKERS: dict[TrackerName, Kind] = {
    "jsonl": Kind("outerstep.tracking.to_jsonl", None, "{run}.jsonl"),
    "tensorboard": Kind("outerstep.tracking.to_tensorboard", "tensorboard", "{run}-tensorboard"),
    "trackio": Kind("outerstep.tracking.to_trackio", "trackio", "{run}-trackio"),
    "wandb": Kind("outerstep.tracking.to_wandb", "wandb", "{run}-wandb"),
}

assert set(TRACKERS) == set(get_args(TrackerName))
