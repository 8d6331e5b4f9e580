"""The verification of blobs, after a start and every hour: disks corrupt what nobody reads.

A corrupt checkpoint or delta is made again if what it was made from is still there, and must get the same digest;
otherwise it is deleted, and an event says so. Contributions are verified when they are aggregated.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import delete, select

from coordinator.runs.guarding import Extent
from coordinator.runs.live_run import LiveRun
from coordinator.store.blobs import Reader
from coordinator.store.files import FileReader
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, FragmentRow
from coordinator.sync import checkpointing, retention
from coordinator.sync.deltas import mend_delta
from coordinator.sync.outer_state import has_state_digest, step
from coordinator.sync.state_file import StateReader

logger = logging.getLogger(__name__)

VERIFY_S = 3600.0


def start_when_due(run: LiveRun, due: dict[int, float], submit: Callable[..., object]) -> None:
    """Start `verify` if it is due, by `submit` on another thread than those that publish. `due`: by run, when it is."""
    with run.lock:
        now = run.world.clock()
        if now >= due.get(run.id, now):
            due[run.id] = math.inf
            submit(_verify, run, due)


def _verify(run: LiveRun, due: dict[int, float]) -> None:
    try:
        verify(run)
    except Exception as error:  # nobody awaits it: the log says it
        if run.world.storage_failed(error) is None:
            logger.exception("%s: the files could not be verified", run.name)
    finally:
        due[run.id] = run.world.clock() + VERIFY_S


def verify(run: LiveRun) -> None:
    """Verify every delta and then every checkpoint that the retention rule keeps; make the corrupt ones again."""
    with run.world.database.read() as session:
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
        if run.world.closing.is_set():
            return
        if retention.keeps_delta(run, round_):
            mend_delta(run, round_, fragment)
    for row in saved:
        if run.world.closing.is_set():
            return
        if not checkpointing.is_intact(run, row):
            _mend_checkpoint(run, row)


def _mend_checkpoint(run: LiveRun, row: CheckpointFragmentRow) -> None:
    """Make the checkpoint's fragment again; if that is impossible, drop the checkpoint unless it is the only one."""
    where = f"fragment {row.fragment} of checkpoint {row.round}"
    if row.round not in retention.complete_checkpoints(run):  # the retention rule has deleted it meanwhile
        return
    if _make_again(run, row):
        with run.change() as change:
            message = f"{where} was corrupt on disk; it was made again, to the same bytes"
            change.record("mended", message, round=row.round, fragment=row.fragment)
        return
    with run.lock:
        others = [round_ for round_ in retention.complete_checkpoints(run) if round_ != row.round]
        with run.change() as change:
            if others:
                for table in (CheckpointRow, CheckpointFragmentRow):
                    change.session.execute(delete(table).where(table.run_id == run.id, table.round == row.round))
                message = f"{where} is corrupt on disk and cannot be made again: the checkpoint is dropped"
            else:
                message = f"{where} is corrupt on disk and cannot be made again: no worker can join until the next one"
            change.record("corrupt", message, round=row.round, fragment=row.fragment)


def _make_again(run: LiveRun, row: CheckpointFragmentRow) -> bool:
    """Make the fragment again: from the outer state if it is of the same round, else from an older checkpoint and the
    deltas after it. Return True if that was possible."""
    current = run.outer.files.path(row.fragment, row.round)
    with run.lock:  # or it might be stepped over meanwhile
        state = run.outer.states[row.fragment]
        if state == (row.round, row.state_digest) and has_state_digest(current, row.state_digest):
            _replace(run, row, current)
            return True
    with run.world.database.read() as session:
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
    """Make the fragment again from checkpoint `base` and the deltas after it; return False if one of them is lost."""
    opened: Callable[[], Reader] = partial(run.blobs.open, run.names.checkpoint(base.round, base.fragment, base.digest))
    scratch: list[Path] = []
    try:
        digest = base.state_digest
        for before in range(base.round, row.round):
            if not mend_delta(run, before, row.fragment):
                return False
            scratch.append(run.world.data.scratch())
            with StateReader(opened()) as state:
                digest = step(run, state, before, row.fragment, scratch[-1], Extent())
            opened = partial(FileReader, scratch[-1])
        if digest != row.state_digest:
            return False
        _replace(run, row, scratch[-1])
        return True
    except FileNotFoundError:  # a delta that the retention rule, or an earlier verification, has deleted
        return False
    finally:
        for path in scratch:
            path.unlink(missing_ok=True)


def _replace(run: LiveRun, row: CheckpointFragmentRow, state: Path) -> None:
    """Put the state in the place of a corrupt blob."""
    run.blobs.delete(run.names.checkpoint(row.round, row.fragment, row.digest))
    checkpointing.write_fragment(run, row.round, row.fragment, state, row.state_digest)
