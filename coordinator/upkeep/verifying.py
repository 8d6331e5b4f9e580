"""Verifying files: after a start, every hour, and when a reader finds one missing. Disks corrupt data that is not read,
and people delete files.

A checkpoint or delta that is missing or corrupt is rebuilt from its sources if they still exist, and must get the same
digest. Otherwise an event reports that it is lost, and workers are no longer sent to it. Contributions and
residuals are verified when they are aggregated.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import select

from coordinator.aggregation.state_file import MaxMagnitude, StateReader
from coordinator.run.live_run import LiveRun
from coordinator.run.outer import State
from coordinator.store.blobs import FileReader, Reader
from coordinator.store.tables import CheckpointFragmentRow, FragmentRow
from coordinator.sync import checkpointing, retention
from coordinator.sync.deltas import rebuild_delta_if_damaged
from coordinator.sync.outer_state import go_back_to_checkpoint, has_state_digest, step
from protocol.errors import OuterstepError

logger = logging.getLogger(__name__)

VERIFY_S = 3600.0
RETRY_S = 5.0


def start_when_due(run: LiveRun, due: dict[int, float], submit: Callable[..., object]) -> None:
    """Start `verify` if it is due or was requested. `submit` runs it on a thread that does no publishing jobs. `due`:
    run id -> time of the next verification; infinite while one is running."""
    with run.lock:
        now = run.context.clock()
        when = due.get(run.id, now)
        if when != math.inf and (now >= when or run.outer.verification_wanted):
            due[run.id] = math.inf
            run.outer.begin_verification()
            submit(_verify, run, due)


def _verify(run: LiveRun, due: dict[int, float]) -> None:
    wait_s = VERIFY_S
    try:
        if not verify(run):
            wait_s = RETRY_S
    except Exception as error:  # nothing awaits the result: the log reports it
        if run.context.storage_failed(error) is None:
            logger.exception("%s: the files could not be verified", run.name)
    finally:
        due[run.id] = run.context.clock() + wait_s


def verify(run: LiveRun) -> bool:
    """Verify every delta and checkpoint that the retention rule keeps, and the outer state. Rebuild what is missing or
    corrupt. If no checkpoint is left, make one of the current state. Return False if a fragment was being stepped: then
    it must be called again soon."""
    with run.context.database.read() as session:
        deltas = session.execute(
            select(FragmentRow.round, FragmentRow.fragment)
            .where(FragmentRow.run_id == run.id, FragmentRow.delta_digest.is_not(None))
            .order_by(FragmentRow.round, FragmentRow.fragment)
        ).all()
        saved = session.scalars(
            select(CheckpointFragmentRow)
            .where(CheckpointFragmentRow.run_id == run.id)
            .order_by(CheckpointFragmentRow.round, CheckpointFragmentRow.fragment)
        ).all()
    for round_, fragment in deltas:
        if run.context.closing.is_set():
            return True
        if retention.keeps_delta(run, round_):
            rebuild_delta_if_damaged(run, round_, fragment)
    damaged = set[int]()
    for row in saved:
        if run.context.closing.is_set():
            return True
        damage = checkpointing.damage(run, row)
        if damage is not None and not _rebuild_checkpoint_fragment(run, row, damage):
            damaged.add(row.round)
    for round_ in run.outer.damaged_checkpoints.keys() - damaged:
        run.outer.mark_intact(round_)  # retention has deleted it, or an operator has restored its files
    none_left = bool(run.outer.damaged_checkpoints) and not retention.complete_checkpoints(run)
    # With neither a checkpoint nor the state, nothing can be rebuilt: `_repair_state` then reports it.
    done = [_repair_state(run, fragment) for fragment in range(len(run.outer.states))]
    return all(done) and not (none_left and not _checkpoint_now(run))


def _rebuild_checkpoint_fragment(run: LiveRun, row: CheckpointFragmentRow, damage: str) -> bool:
    """Rebuild the checkpoint's fragment. Return False if that is impossible: then no worker is sent to the checkpoint
    until its file exists again."""
    where = f"fragment {row.fragment} of checkpoint {row.round}"
    if not _is_kept(run, row):
        return True
    if _rebuild(run, row):
        with run.change() as change:
            message = f"{where} was {damage} on disk; it was rebuilt, to the same bytes"
            change.record("mended", message, round=row.round, fragment=row.fragment)
        return True
    if row.round not in run.outer.damaged_checkpoints:
        with run.change() as change:
            message = f"{where} is {damage} on disk and cannot be rebuilt"
            change.record("corrupt", message, round=row.round, fragment=row.fragment)
            change.after_commit(partial(run.outer.mark_damaged, row.round, message))
    return False


def _is_kept(run: LiveRun, row: CheckpointFragmentRow) -> bool:
    """Return False if the retention rule has deleted the checkpoint in the meantime."""
    return row.round in [*retention.complete_checkpoints(run), *run.outer.damaged_checkpoints]


def _repair_state(run: LiveRun, fragment: int) -> bool:
    """If the file of a fragment's current state is missing or corrupt, go back to a checkpoint; the publishing job then
    steps it to the current round. Return False while that job is running."""
    with run.lock:
        state = run.outer.states[fragment]
    path = run.outer.files.path(fragment, state.round)
    if not run.outer.is_here(fragment):
        return True  # an aggregator has it, or derives it
    if run.outer.damage is not None or has_state_digest(path, state.digest):
        return True
    with run.lock:
        if run.outer.jobs[fragment].running or run.outer.states[fragment] != state:
            return False
        if not has_state_digest(path, state.digest):  # again, as the file may have been overwritten while it was read
            try:
                go_back_to_checkpoint(run, fragment)
            except OuterstepError as error:
                with run.change() as change:
                    change.record("corrupt", str(error), round=state.round, fragment=fragment)
                    change.after_commit(partial(run.outer.block, str(error)))
        return True


def _checkpoint_now(run: LiveRun) -> bool:
    """Make a checkpoint of the current state, although none is due. Return False while that is not possible."""
    with run.lock:  # no fragment is stepped in the meantime
        states = list(run.outer.states)
        if not all(run.outer.is_here(fragment) for fragment in range(len(states))):
            return True  # aggregators have them, and write the next checkpoint that is due
        if any(each.round != run.round for each in states) or run.outer.any_job_running:
            return False
        for fragment, state in enumerate(states):
            path = run.outer.files.path(fragment, state.round)
            if not has_state_digest(path, state.digest):
                return False
            blob = checkpointing.write_blob(run, state.round, fragment, path)
            checkpointing.record_fragment(run, fragment, state, blob)
        run.outer.mark_intact(run.round)
        with run.change() as change:
            completed = checkpointing.record_if_complete(change, run.round)
    if completed:
        retention.clean(run)
    return True


def _rebuild(run: LiveRun, row: CheckpointFragmentRow) -> bool:
    """Rebuild the fragment, either from the outer state if that has the same round, or from an older checkpoint and the
    deltas after it. Return True if that was possible."""
    current = run.outer.files.path(row.fragment, row.round)
    with run.lock:  # otherwise a step might overwrite it
        state = run.outer.states[row.fragment]
        if state == (row.round, row.state_digest) and has_state_digest(current, row.state_digest):
            _replace(run, row, current)
            return True
    with run.context.database.read() as session:
        older = session.scalars(
            select(CheckpointFragmentRow)
            .where(
                CheckpointFragmentRow.run_id == run.id,
                CheckpointFragmentRow.fragment == row.fragment,
                CheckpointFragmentRow.round < row.round,
            )
            .order_by(CheckpointFragmentRow.round.desc())
        ).all()
    for base in older:
        if checkpointing.is_intact(run, base):
            return _derive(run, base, row)
    return False


def _derive(run: LiveRun, base: CheckpointFragmentRow, row: CheckpointFragmentRow) -> bool:
    """Rebuild the fragment from checkpoint `base` and the deltas after it. Return False if one of them is lost."""
    opened: Callable[[], Reader] = partial(run.blobs.open, run.names.checkpoint(base.round, base.fragment, base.digest))
    scratch: list[Path] = []
    try:
        digest = base.state_digest
        for before in range(base.round, row.round):
            if not rebuild_delta_if_damaged(run, before, row.fragment):
                return False
            scratch.append(run.context.data.scratch())
            with StateReader(opened()) as state:
                digest = step(run, state, before, row.fragment, scratch[-1], MaxMagnitude())
            opened = partial(FileReader, scratch[-1])
        if digest != row.state_digest:
            return False
        _replace(run, row, scratch[-1])
        return True
    except FileNotFoundError:  # a delta that retention or an earlier verification has deleted
        return False
    finally:
        for path in scratch:
            path.unlink(missing_ok=True)


def _replace(run: LiveRun, row: CheckpointFragmentRow, state: Path) -> None:
    """Replace a corrupt blob with the state, unless retention has deleted the checkpoint in the meantime."""
    with run.lock:  # retention holds it while it deletes the rows; it deletes the blobs later
        if _is_kept(run, row):
            run.blobs.delete(run.names.checkpoint(row.round, row.fragment, row.digest))
            blob = checkpointing.write_blob(run, row.round, row.fragment, state)
            checkpointing.record_fragment(run, row.fragment, State(row.round, row.state_digest), blob)
