"""What the operator does to a run: pause, resume, drain, stop. Everything that changes a run's state is here, but for
its end, which is the last round's.

    paused     the open round closes, no other opens; the workers stay and wait
    draining   the same, and the workers leave; when the last one has left the run is paused
    stopped    over: the open round is given up, the workers leave

A run that comes to rest keeps a checkpoint of its last state (`checkpointing.py`), so nothing is lost by any of them.
"""

from coordinator.runs import assigning
from coordinator.runs.live_run import LiveRun
from coordinator.sync import publishing
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


def change_state(run: LiveRun, state: RunState) -> None:
    """Pause, resume, drain or stop. Problem `run-ended` for a run that is over."""
    with run.lock:
        if state is run.state:
            return
        if state not in CHANGES[run.state]:
            raise Problem("run-ended", f"the run {run.name} is {run.state} and cannot become {state}")
        _set(run, state, f"the operator set the run to {state}")
        publishing.close_due(run)
        assigning.try_open(run)  # or say why not
        note_drained(run)
        for fragment in range(len(run.outer)):
            publishing.start_job(run, fragment)  # a run at rest keeps a checkpoint
    run.wake()


def note_drained(run: LiveRun) -> None:
    """A draining run without an open round and without workers is paused. Holds the lock."""
    if run.state is RunState.DRAINING and run.open is None and not len(run.leases):
        _set(run, RunState.PAUSED, "the run is drained: all workers have left; it is paused", kind="drained")
        assigning.try_open(run)


def leaves(run: LiveRun, worker: str) -> bool:
    """Whether `worker` is to leave a draining run now: unless the open round is its own, or cannot close without it.

    Holds the lock.
    """
    if run.state is not RunState.DRAINING:
        return False
    if run.open is None or run.layout is None:
        return True
    taking_part = run.open.assigned & run.leases.live()
    contributed = min((len(fragment.contributed) for fragment in run.open.fragments), default=0)
    return worker not in taking_part and max(len(taking_part), contributed) >= run.policy.min_workers


def _set(run: LiveRun, state: RunState, message: str, *, kind: str | None = None) -> None:
    with run.world.database.write() as session:
        run.row(session).state = state
        run.record(session, kind or str(state), message)
    run.state = state
