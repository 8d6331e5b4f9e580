"""Settling: do what follows from a run's state, its members and the time, until nothing more follows.

`LiveRun.settle` calls it after every change of the run, after a start, and a few times a second.
"""

from coordinator.rounds import closing, opening, steering
from coordinator.run.live_run import LiveRun
from coordinator.sync import publishing


def settle(run: LiveRun) -> None:
    """Close the fragments that are due, open the next round, and pause a drained run. Then publish closed fragments.
    The caller holds the run's lock."""
    while closing.close_due(run) or opening.open_next(run) or steering.pause_if_drained(run):
        pass
    publishing.start_due(run)
