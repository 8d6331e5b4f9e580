"""The coordinator's own outer state: stepped after every round, derived again if it is lost.

After a round, the coordinator takes the same outer step as every worker, with the same decoded delta. The state can be
derived again from a checkpoint and the deltas after it, so its files are not fsynced.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import select

from coordinator.aggregation.state_file import MaxMagnitude, StateReader, stepped, write_state
from coordinator.aggregation.tasks import Blob
from coordinator.run.live_run import LiveRun
from coordinator.run.outer import State
from coordinator.run.waiters import EVENTS
from coordinator.store.blobs import FileReader, StoreOutage
from coordinator.store.database import disk_is_full
from coordinator.store.payloads import StoredPayload
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, FragmentRow, OuterStateRow
from coordinator.sync import checkpointing, delegating, retention
from coordinator.sync.deltas import rebuild_delta_if_damaged
from coordinator.trust.guard import check_values
from outerstep.common.connections import error_text
from protocol.errors import OuterstepError, WireError
from protocol.wire import Payload

logger = logging.getLogger(__name__)


def catch_up(run: LiveRun, fragment: int) -> None:
    """Take the outer steps of `fragment` for all rounds that have ended: an aggregator takes them, or this process.

    A step waits until its round has ended, because before that workers wait for the round's other fragments to be
    aggregated. Raises OuterstepError if the disk has lost what a step needs.
    """
    delegation = run.context.delegation
    while (before := run.outer.states[fragment].round) < run.round:
        if delegation is not None:
            checkpointed = checkpointing.is_due(run, before + 1)
            advanced = delegating.advance(run, delegation, fragment, before + 1, checkpoint=checkpointed)
            if advanced is not None:
                after = State(before + 1, advanced.digest)
                _record_step(run, fragment, after, advanced.largest, advanced.checkpoint, here=False)
                continue
            delegation = None  # a step that no aggregator can take may need others to be taken here again
        with run.context.working:
            _step_here(run, fragment)


def bring_here(run: LiveRun, fragment: int) -> None:
    """Derive the file of the fragment's state on this machine, unless it is here. Raises like `catch_up`."""
    while not _is_here(run, fragment) or run.outer.states[fragment].round < run.round:
        with run.context.working:
            _step_here(run, fragment)


def _step_here(run: LiveRun, fragment: int) -> None:
    """Take one outer step in this process; if it lacks what the step needs, go back to a checkpoint instead."""
    if not _is_here(run, fragment):
        go_back_to_checkpoint(run, fragment)
        return
    before = run.outer.states[fragment].round
    if before == run.round:
        return
    if _recent_delta(run, before, fragment) is None and not rebuild_delta_if_damaged(run, before, fragment):
        go_back_to_checkpoint(run, fragment, after=before)
        return
    _step(run, fragment)


def _is_here(run: LiveRun, fragment: int) -> bool:
    """Return True if the file of the fragment's state is on this machine."""
    state = run.outer.states[fragment]
    path = run.outer.files.path(fragment, state.round)
    if run.outer.is_here(fragment):
        return _is_complete(path)
    if not has_state_digest(path, state.digest):
        return False
    run.outer.note_here(fragment, state)
    return True


def _is_complete(path: Path) -> bool:
    """Return True if the state file exists and has its full length."""
    try:
        with StateReader(FileReader(path)):
            return True
    except (FileNotFoundError, WireError):
        return False


def _step(run: LiveRun, fragment: int) -> None:
    """Take one outer step, with the delta of the state's round."""
    before = run.outer.states[fragment].round
    after = before + 1
    target = run.outer.files.path(fragment, after)
    largest = MaxMagnitude()
    with StateReader(FileReader(run.outer.files.path(fragment, before))) as state:
        digest = step(run, state, before, fragment, target, largest)
    blob = checkpointing.write_blob(run, after, fragment, target) if checkpointing.is_due(run, after) else None
    _record_step(run, fragment, State(after, digest), largest.largest, blob, here=True)


def _record_step(run: LiveRun, fragment: int, state: State, largest: float, blob: Blob | None, *, here: bool) -> None:
    """Make `state` the fragment's. `largest`: the largest magnitude of its values. `blob`: its blob, if it belongs to a
    checkpoint. `here`: its file is on this machine."""
    if blob is not None:
        checkpointing.record_fragment(run, fragment, state, blob)
    with run.change() as change:
        row = change.session.get_one(OuterStateRow, (run.id, fragment))
        row.round, row.state_digest = state
        completed = blob is not None and checkpointing.record_if_complete(change, state.round)
        check_values(change, largest, state.round, fragment)
        change.after_commit(partial(run.outer.set, fragment, state, here=here))
        change.wake(EVENTS)
    if completed:
        retention.clean(run)


def checkpoint_at_rest(run: LiveRun, fragment: int) -> None:
    """Checkpoint the state of `fragment` if `checkpointing.is_due_at_rest` returns True."""
    with run.lock:
        state = run.outer.states[fragment]
        if not checkpointing.is_due_at_rest(run, fragment):
            return
    delegation = run.context.delegation
    advanced = (
        None if delegation is None else delegating.advance(run, delegation, fragment, state.round, checkpoint=True)
    )
    if advanced is not None and advanced.checkpoint is not None:
        blob = advanced.checkpoint
    else:
        bring_here(run, fragment)
        with run.context.working:
            blob = checkpointing.write_blob(run, state.round, fragment, run.outer.files.path(fragment, state.round))
    checkpointing.record_fragment(run, fragment, state, blob)
    with run.change() as change:
        completed = checkpointing.record_if_complete(change, state.round)
    if completed:
        retention.clean(run)


def step(run: LiveRun, state: StateReader, before: int, fragment: int, target: Path, largest: MaxMagnitude) -> bytes:
    """Apply the delta of round `before` to that round's state, and write the result to the file `target`. Return the
    new state's digest. `largest` records the largest magnitude of its values."""
    with _delta(run, before, fragment) as delta:
        chunks = largest.watch(stepped(state, delta, run.spec.outer))
        return write_state(target, run.name, before + 1, fragment, state.elements, chunks)


def theta_norm(run: LiveRun, fragment: int, round_: int) -> float:
    """Return the L2 norm of the fragment's θ in state `round_`, from its file."""
    with StateReader(FileReader(run.outer.files.path(fragment, round_))) as state:
        return state.theta_norm()


def _recent_delta(run: LiveRun, round_: int, fragment: int) -> memoryview | None:
    """Return the published delta if it is still in memory, else None."""
    digest = run.outer.deltas.get((round_, fragment))
    return None if digest is None else run.context.memory.delta(digest)


@contextmanager
def _delta(run: LiveRun, round_: int, fragment: int) -> Iterator[Payload]:
    """Open the published delta, from memory if possible. Raises FileNotFoundError."""
    content = _recent_delta(run, round_, fragment)
    if content is not None:
        yield Payload.from_bytes(content)
    else:
        with run.context.database.read() as session:
            row = session.get(FragmentRow, (run.id, round_, fragment))
        if row is None or row.delta_digest is None:
            raise FileNotFoundError(f"the database has no delta of round {round_}, fragment {fragment}")
        with StoredPayload(run.blobs.open(run.names.delta(round_, fragment, row.delta_digest))) as delta:
            yield delta


def fetch_checkpoint(run: LiveRun, row: CheckpointFragmentRow) -> None:
    """Copy one fragment of a checkpoint to the local file of the outer state."""
    name = run.names.checkpoint(row.round, row.fragment, row.digest)
    run.blobs.fetch(name, run.outer.files.path(row.fragment, row.round))


def restore(run: LiveRun) -> None:
    """Bring the outer state to that of the open or next round, after a start.

    A state file that is missing or corrupt (it was not fsynced) is derived again from the newest intact checkpoint and
    the deltas after it. With aggregators, that is left to them.
    """
    with run.context.database.read() as session:
        seeded = session.scalars(select(CheckpointRow.round).where(CheckpointRow.run_id == run.id).limit(1)).all()
        rows = session.scalars(
            select(OuterStateRow).where(OuterStateRow.run_id == run.id).order_by(OuterStateRow.fragment)
        ).all()
    if not seeded:
        return
    outer = run.outer
    outer.begin([State(row.round, row.state_digest) for row in rows], here=False)
    if delegating.is_possible(run):
        return  # aggregators have the states, or derive them
    try:
        for fragment in range(len(outer.states)):
            bring_here(run, fragment)
    except (OuterstepError, OSError) as error:  # other runs continue; this one reports what it needs
        if disk_is_full(error) or isinstance(error, StoreOutage):
            raise  # not damage: the next start finds space or the store, or fails again
        reason = error_text(error)
        logger.error("%s: the outer state cannot be restored: %s", run.name, reason)
        outer.block(reason)
        return
    outer.files.remove_all_but({outer.files.path(fragment, each.round) for fragment, each in enumerate(outer.states)})


def go_back_to_checkpoint(run: LiveRun, fragment: int, after: int = -1) -> None:
    """Go back to the newest intact checkpoint of `fragment` that is later than state `after`."""
    with run.context.database.read() as session:
        saved = session.scalars(
            select(CheckpointFragmentRow)
            .join(
                CheckpointRow,
                (CheckpointRow.run_id == CheckpointFragmentRow.run_id)
                & (CheckpointRow.round == CheckpointFragmentRow.round),
            )
            .where(
                CheckpointFragmentRow.run_id == run.id,
                CheckpointFragmentRow.fragment == fragment,
                CheckpointFragmentRow.round > after,
            )
            .order_by(CheckpointFragmentRow.round.desc())
        ).all()
    intact = (each for each in saved if checkpointing.is_intact(run, each))
    checkpoint = next(intact, None)
    if checkpoint is None:
        raise OuterstepError(
            f"no intact checkpoint is left from which the state of fragment {fragment} could be rebuilt; restore the "
            f"data directory of the run {run.name} from a backup"
        )
    round_ = checkpoint.round
    fetch_checkpoint(run, checkpoint)
    with run.change() as change:
        change.record("rederived", f"fragment {fragment} of the outer state is rebuilt from checkpoint {round_}")
        row = change.session.get_one(OuterStateRow, (run.id, fragment))
        row.round, row.state_digest = round_, checkpoint.state_digest
        change.after_commit(partial(run.outer.set, fragment, State(round_, checkpoint.state_digest), here=True))


def has_state_digest(path: Path, state_digest: bytes) -> bool:
    """Return True if the state file exists and has this state digest."""
    try:
        with StateReader(FileReader(path)) as state:
            return state.state_digest() == state_digest
    except (OSError, WireError):
        return False
