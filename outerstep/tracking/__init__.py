"""Sends a run's rounds and events to an experiment tracker, from outside: coordinator and workers are not involved.

Each module of TRACKERS has a class `Tracker`. It is created with a path, the name under which the run is tracked, and
the run; it reads back how far it has come, writes records, and is closed.
"""

from typing import Literal, NamedTuple, get_args

TrackerName = Literal["jsonl", "tensorboard", "wandb"]


class TrackerModule(NamedTuple):
    """A tracker's module, the extra that it needs (None: nothing), and its default output."""

    module: str
    extra: str | None
    out: str


TRACKERS: dict[TrackerName, TrackerModule] = {
    "jsonl": TrackerModule("outerstep.tracking.to_jsonl", None, "{run}.jsonl"),
    "tensorboard": TrackerModule("outerstep.tracking.to_tensorboard", "tensorboard", "{run}-tensorboard"),
    "wandb": TrackerModule("outerstep.tracking.to_wandb", "wandb", "{run}-wandb"),
}

assert set(TRACKERS) == set(get_args(TrackerName))
