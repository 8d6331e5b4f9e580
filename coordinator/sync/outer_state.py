"""The coordinator's own outer state.

After a round, the coordinator takes the same outer step as every worker, by the same decoded delta. The state can be
derived again from a checkpoint and the deltas after it, so it need not be fsynced.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from sqlalchemy import select

from coordinator.run.live_run import Change, LiveRun
from coordinator.run.outer import State
from coordinator.run.waiters import EVENTS
from coordinator.store.blobs import FileReader
from coordinator.store.database import disk_is_full
from coordinator.store.payloads import StoredPayload
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, FragmentRow, OuterStateRow
from coordinator.sync import checkpointing, retention
from coordinator.sync.deltas import mend_delta
from coordinator.sync.state_file import StateReader, stepped, write_state
from coordinator.trust.guard import MaxMagnitude, check_values
from protocol.errors import OuterstepError, WireError
from protocol.wire import Payload

logger = logging.getLogger(__name__)


def catch_up(run: LiveRun, fragment: int) -> None:
    """Take the outer steps of `fragment` for all rounds that are over.

    A step waits for the end of its round, because until then workers wait for its other fragments to be aggregated.
    Raises OuterstepError if the disk has lost what a step needs.
    """
    while (before := run.outer.states[fragment].round) < run.round:
        if not _is_there(run.outer.files.path(fragment, before)):
            go_back_to_checkpoint(run, fragment)
            continue
        if _recent_delta(run, before, fragment) is None and not mend_delta(run, before, fragment):
            go_back_to_checkpoint(run, fragment, after=before)
            continue
        with run.traced("outer-step", before, fragment):
            _step(run, fragment)


def _is_there(path: Path) -> bool:
    """Return True if the state file is there and has its whole length."""
    try:
        with StateReader(FileReader(path)):
            return True
    except (FileNotFoundError, WireError):
        return False


def _step(run: LiveRun, fragment: int) -> None:
    """Take one outer step, by the delta of the state's round."""
    before = run.outer.states[fragment].round
    after = before + 1
    target = run.outer.files.path(fragment, after)
    largest = MaxMagnitude()
    with StateReader(FileReader(run.outer.files.path(fragment, before))) as state:
        digest = step(run, state, before, fragment, target, largest)
    checkpointed = checkpointing.is_due(run, after)
    if checkpointed:
        checkpointing.write_fragment(run, after, fragment, target, digest)
    with run.change() as change:
        row = change.session.get_one(OuterStateRow, (run.id, fragment))
        row.round, row.state_digest = after, digest
        completed = checkpointed and checkpointing.record_if_complete(change, after)
        check_values(change, largest, after, fragment)
        change.after_commit(partial(run.outer.set, fragment, State(after, digest)))
        change.wake(EVENTS)
    if completed:
        retention.clean(run)


def step(run: LiveRun, state: StateReader, before: int, fragment: int, target: Path, largest: MaxMagnitude) -> bytes:
    """Step the state of round `before` by that round's delta into the file `target`; return the new state's digest."""
    with _delta(run, before, fragment) as delta:
        chunks = largest.watch(stepped(state, delta, run.spec.outer))
        return write_state(target, run.name, before + 1, fragment, state.elements, chunks)


def theta_norm(run: LiveRun, fragment: int, round_: int) -> float:
    """Return the L2 norm of the fragment's θ in state `round_`, from its file."""
    squares = 0.0
    with StateReader(FileReader(run.outer.files.path(fragment, round_))) as state:
        for theta, _ in state.read_chunks():
            squares += float(np.dot(theta, theta))
    return math.sqrt(squares)


def _recent_delta(run: LiveRun, round_: int, fragment: int) -> memoryview | None:
    """Return the published delta if it is still in memory, else None."""
    digest = run.outer.deltas.get((round_, fragment))
    return None if digest is None else run.context.memory.delta(digest)


@contextmanager
def _delta(run: LiveRun, round_: int, fragment: int) -> Iterator[Payload]:
    """Open the published delta, from memory if it is still there. Raises FileNotFoundError."""
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


def set_state_0(change: Change, digests: list[bytes]) -> None:
    """Make state 0, whose files are in place, the outer state. `digests`: its state digests, by fragment."""
    run = change.run
    for fragment, digest in enumerate(digests):
        change.session.add(OuterStateRow(run_id=run.id, fragment=fragment, round=0, state_digest=digest))
    change.after_commit(partial(run.outer.begin, [State(0, digest) for digest in digests]))


def fetch_checkpoint(run: LiveRun, row: CheckpointFragmentRow) -> None:
    """Make one fragment of a checkpoint the local file of the outer state."""
    name = run.names.checkpoint(row.round, row.fragment, row.digest)
    run.blobs.fetch(name, run.outer.files.path(row.fragment, row.round))


def restore(run: LiveRun) -> None:
    """After a start, bring the outer state to that of the open or next round.

    A state file that is missing or corrupt (it was not fsynced) is derived again from the newest intact checkpoint;
    then the steps by the deltas after it are taken.
    """
    with run.context.database.read() as session:
        seeded = session.scalars(select(CheckpointRow.round).where(CheckpointRow.run_id == run.id).limit(1)).all()
        rows = session.scalars(
            select(OuterStateRow).where(OuterStateRow.run_id == run.id).order_by(OuterStateRow.fragment)
        ).all()
    if not seeded:
        return
    outer = run.outer
    outer.begin([State(row.round, row.state_digest) for row in rows])
    try:
        for fragment, (round_, digest) in enumerate(outer.states):
            if not has_state_digest(outer.files.path(fragment, round_), digest):
                go_back_to_checkpoint(run, fragment)
            catch_up(run, fragment)
    except (OuterstepError, OSError) as error:  # the other runs are served, and this one says what it needs
        if disk_is_full(error):
            raise  # that is no damage: the next start finds room, or says so again
        logger.exception("%s: the outer state cannot be restored", run.name)
        outer.stop(str(error))
        return
    outer.files.remove_all_but({outer.files.path(fragment, each.round) for fragment, each in enumerate(outer.states)})


def go_back_to_checkpoint(run: LiveRun, fragment: int, after: int = -1) -> None:
    """Make the newest intact checkpoint of `fragment`, of a state later than `after`, its outer state."""
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
            f"no checkpoint of fragment {fragment} that could give its state again is sound on disk; restore the "
            f"data directory of the run {run.name} from a backup"
        )
    round_ = checkpoint.round
    fetch_checkpoint(run, checkpoint)
    with run.change() as change:
        change.record("rederived", f"fragment {fragment} of the outer state is derived again from checkpoint {round_}")
        row = change.session.get_one(OuterStateRow, (run.id, fragment))
        row.round, row.state_digest = round_, checkpoint.state_digest
        change.after_commit(partial(run.outer.set, fragment, State(round_, checkpoint.state_digest)))


def has_state_digest(path: Path, state_digest: bytes) -> bool:
    """Return True if the state file is there and has this state digest."""
    try:
        with StateReader(FileReader(path)) as state:
            return state.state_digest() == state_digest
    except (OSError, WireError):
        return False
