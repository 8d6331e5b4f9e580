"""The settling of a run: what follows from its state, its members and the time is done, until nothing more follows.

Called in one place, `LiveRun.settle`: after every change of the run, after a start, and a few times a second.
"""

from coordinator.rounds import closing, opening, steering
from coordinator.run.live_run import Settling
from coordinator.sync import publishing


def settle(settling: Settling) -> None:
    """Close the fragments that are due, open the next round, pause a drained run; then publish what is closed."""
    while closing.close_due(settling) or opening.open_next(settling) or steering.pause_if_drained(settling):
        pass
    publishing.start_due(settling)
