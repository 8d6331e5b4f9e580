"""Checkpoints of the coordinator's outer state: when one is due, and how it becomes durable, fragment by fragment.

A checkpoint is complete when all its fragments are durable. One is due every `checkpoints.every_rounds` rounds, at the
end of the run, and when the run is stopped, paused or drained, so that no progress is lost.
"""

from pathlib import Path

from sqlalchemy import select

from coordinator.aggregation.states import store_state
from coordinator.aggregation.tasks import Blob
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.outer import State
from coordinator.store.payloads import fault_in
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow
from protocol.digest import model_digest
from protocol.fragments import Layout
from protocol.messages import CheckpointFragment, RunState

RESTING = (RunState.STOPPED, RunState.PAUSED, RunState.DRAINING)


def is_due(run: LiveRun, round_: int) -> bool:
    """Return True if the run spec asks for a checkpoint of state `round_`."""
    last = run.state is RunState.FINISHED and round_ == run.round
    return last or round_ % run.spec.checkpoints.every_rounds == 0


def is_due_at_rest(run: LiveRun, fragment: int) -> bool:
    """Return True if the run is at rest and no checkpoint has the state of `fragment` yet. At rest, no round changes
    that state until the operator resumes the run."""
    with run.lock:
        at_rest = run.state is RunState.STOPPED or (run.state in RESTING and run.open is None)
        if not at_rest or run.outer.states[fragment].round != run.round:
            return False
        with run.context.database.read() as session:
            return session.get(CheckpointFragmentRow, (run.id, run.round, fragment)) is None


def write_blob(run: LiveRun, round_: int, fragment: int, state: Path) -> Blob:
    """Put one fragment of a checkpoint into the store, durably. `state`: the path of its state file."""
    return store_state(run.blobs, run.name, round_, fragment, state)


def record_fragment(run: LiveRun, fragment: int, state: State, blob: Blob) -> CheckpointFragmentRow:
    """Add one fragment to a checkpoint, whose blob is in the store."""
    with run.change() as change:
        return change.session.merge(
            CheckpointFragmentRow(
                run_id=run.id,
                round=state.round,
                fragment=fragment,
                size=blob.size,
                digest=blob.digest,
                state_digest=state.digest,
            )
        )


def record_if_complete(change: Change, round_: int) -> bool:
    """Record the checkpoint if its last fragment has just become durable. Return True if it was recorded, so that older
    ones may be deleted.

    Call it in the same transaction as the step: a crash between the two would leave the checkpoint incomplete forever.
    """
    run, session = change.run, change.session
    rows = session.scalars(
        select(CheckpointFragmentRow)
        .where(CheckpointFragmentRow.run_id == run.id, CheckpointFragmentRow.round == round_)
        .order_by(CheckpointFragmentRow.fragment)
    ).all()
    if len(rows) < len(run.outer.states) or session.get(CheckpointRow, (run.id, round_)) is not None:
        return False
    digest = model_digest(row.state_digest for row in rows)
    session.add(CheckpointRow(run_id=run.id, round=round_, created_at=run.context.now(), state_digest=digest))
    change.record("checkpoint", f"checkpoint {round_} is complete", round=round_)
    return True


def is_intact(run: LiveRun, row: CheckpointFragmentRow) -> bool:
    """Return True if the fragment's blob exists and has its digest."""
    return damage(run, row) is None


def damage(run: LiveRun, row: CheckpointFragmentRow) -> str | None:
    """Return what is wrong with the fragment's blob (`fault_in`); None if it is intact."""
    return fault_in(run.blobs, run.names.checkpoint(row.round, row.fragment, row.digest), row.digest)


def describe(row: CheckpointFragmentRow, layout: Layout) -> CheckpointFragment:
    """Return the row as the REST interface shows it."""
    return CheckpointFragment(
        fragment=row.fragment,
        elements=layout.elements[row.fragment],
        bytes=row.size,
        digest=row.digest.hex(),
        state_digest=row.state_digest.hex(),
    )
