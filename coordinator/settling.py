"""Settling a run: do what follows from its state, its members and the time, until nothing more follows.

`LiveRun.settle` is the only caller: after every change of the run, after a start, and a few times a second.
"""

from coordinator.rounds import closing, opening, steering
from coordinator.run.live_run import Settling
from coordinator.sync import publishing


def settle(settling: Settling) -> None:
    """Close due fragments, open the next round, pause a drained run; then publish closed fragments."""
    while closing.close_due(settling) or opening.open_next(settling) or steering.pause_if_drained(settling):
        pass
    publishing.start_due(settling)
