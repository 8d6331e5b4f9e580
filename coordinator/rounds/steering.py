"""What the operator does to a run: pause, resume, drain, stop.


    paused     the open round is finished and no other opens; the workers stay and wait
    draining   the open round is finished and the workers leave; when the last one has left, the run is paused
    stopped    the run is over: the open round is abandoned and the workers leave

The other changes of a run's state are: the last round finishes it (`sync/publishing.py`), the guard pauses it
(`trust/guard.py`), and a rollback pauses or resumes it (`upkeep/rolling_back.py`). A run that comes to rest gets a
checkpoint of its last state (`sync/checkpointing.py`), so nothing is lost.
"""

from coordinator.run.live_run import LiveRun
from coordinator.store.identity import Actor
from coordinator.trust import guard
from protocol.errors import Problem
from protocol.messages import RunState

# state -> the states that the operator may set from there
CHANGES: dict[RunState, set[RunState]] = {
    RunState.RUNNING: {RunState.PAUSED, RunState.DRAINING, RunState.STOPPED},
    RunState.PAUSED: {RunState.RUNNING, RunState.DRAINING, RunState.STOPPED},
    RunState.DRAINING: {RunState.RUNNING, RunState.PAUSED, RunState.STOPPED},
    RunState.FINISHED: set(),
    RunState.STOPPED: set(),
}


def change_state(run: LiveRun, state: RunState, by: Actor) -> None:
    """Pause, resume, drain or stop the run. Raises Problem `run-ended` if the run is over."""
    with run.change() as change:
        if state is run.state:
            return
        if state not in CHANGES[run.state]:
            raise Problem("run-ended", f"the run {run.name} is {run.state} and cannot become {state}")
        change.set_state(state)
        guard.note_operator(change)
        change.record(str(state), f"the operator set the run to {state}")
        change.audit(by, "run-changed", f"set the run to {state}")
        change.wake()


def pause_if_drained(run: LiveRun) -> bool:
    """Pause a draining run that has neither an open round nor workers; return True if it was paused."""
    if run.state is not RunState.DRAINING or run.open is not None or len(run.members):
        return False
    with run.change() as change:
        change.set_state(RunState.PAUSED)
        change.record("drained", "the run is drained: all workers have left; it is paused")
    return True


def must_leave(run: LiveRun, worker: str) -> bool:
    """Return True if the run is draining and `worker` should leave now: it has no part in the open round, and the round
    can close without it."""
    if run.state is not RunState.DRAINING:
        return False
    if run.open is None:
        return True
    if worker in run.open.assigned & run.members.live():
        return False
    expected, _ = run.members.waited_for(run.open.assigned)
    contributed = min((len(fragment.contributed) for fragment in run.open.fragments), default=0)
    return max(len(expected), contributed) >= run.spec.members.min_workers


def refuses_join(run: LiveRun, worker: str) -> bool:
    """Return True if the run is draining and `worker`, which holds no lease, may not join because it would have to
    leave at once. A worker with a part in the open round may come back to finish it."""
    return must_leave(run, worker) and (run.open is None or worker not in run.open.assigned)
