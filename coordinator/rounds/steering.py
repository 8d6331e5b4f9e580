"""What the operator does to a run: pause, resume, drain, stop. Every change of a run's state is here, except that
the last round finishes it (`publishing.py`).

    paused     the open round closes, no other opens; the workers stay and wait
    draining   the same, and the workers leave; when the last one has left the run is paused
    stopped    over: the open round is given up, the workers leave

A run that comes to rest gets a checkpoint of its last state (`checkpointing.py`), so none of these loses anything.
"""

from coordinator.run.live_run import Change, LiveRun, Settling
from coordinator.store.identity import Actor
from protocol.errors import Problem
from protocol.messages import RunState

# What the operator may do to a run that is in a given state.
CHANGES: dict[RunState, set[RunState]] = {
    RunState.RUNNING: {RunState.PAUSED, RunState.DRAINING, RunState.STOPPED},
    RunState.PAUSED: {RunState.RUNNING, RunState.DRAINING, RunState.STOPPED},
    RunState.DRAINING: {RunState.RUNNING, RunState.PAUSED, RunState.STOPPED},
    RunState.FINISHED: set(),
    RunState.STOPPED: set(),
}


def change_state(run: LiveRun, state: RunState, by: Actor) -> None:
    """Pause, resume, drain or stop. Problem `run-ended` for a run that is over."""
    with run.change() as change:
        if state is run.state:
            return
        if state not in CHANGES[run.state]:
            raise Problem("run-ended", f"the run {run.name} is {run.state} and cannot become {state}")
        _set_state(change, state, f"the operator set the run to {state}")
        change.audit(by, "run-changed", f"set the run to {state}")
        change.wake()


def pause_if_drained(settling: Settling) -> bool:
    """Pause a draining run that has neither an open round nor workers; return True if it was."""
    run = settling.run
    if run.state is not RunState.DRAINING or run.open is not None or len(run.members):
        return False
    with settling.change() as change:
        message = "the run is drained: all workers have left; it is paused"
        _set_state(change, RunState.PAUSED, message, kind="drained")
    return True


def must_leave(run: LiveRun, worker: str) -> bool:
    """Return True if the run is draining and `worker` is to leave it now: it has no part in the open round, and the
    round can close without it."""
    if run.state is not RunState.DRAINING:
        return False
    if run.open is None:
        return True
    if worker in run.open.assigned & run.members.live():
        return False
    expected, _ = run.members.waited_for(run.open.assigned)
    contributed = min((len(fragment.contributed) for fragment in run.open.fragments), default=0)
    return max(len(expected), contributed) >= run.spec.members.min_workers


def turns_away(run: LiveRun, worker: str) -> bool:
    """Return True if the run is draining and `worker`, which holds no lease, is not to join it: it would be told to
    leave. Whoever has a part in the open round may come back to finish it."""
    return must_leave(run, worker) and (run.open is None or worker not in run.open.assigned)


def _set_state(change: Change, state: RunState, message: str, *, kind: str | None = None) -> None:
    change.set_state(state)
    change.record(kind or str(state), message)
