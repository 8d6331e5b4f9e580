"""The coordinator's own outer state: uploaded as state 0, stepped after every round, derived again if it is lost.

After a round, the coordinator takes the same outer step as every worker, with the same decoded delta. The state can be
derived again from a checkpoint and the deltas after it, so its files are not fsynced.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from sqlalchemy import delete, select

from coordinator.aggregation.state_file import BOUND, F32, MaxMagnitude, StateReader, stepped, write_state
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.outer import State
from coordinator.run.waiters import EVENTS
from coordinator.store.blobs import FileReader, StoreOutage
from coordinator.store.database import disk_is_full
from coordinator.store.payloads import Body, StoredPayload
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, FragmentRow, OuterStateRow
from coordinator.sync import checkpointing, retention
from coordinator.sync.deltas import rebuild_delta_if_damaged
from coordinator.trust.guard import check_values
from outerstep.common.quantities import counted
from protocol.digest import model_digest
from protocol.errors import OuterstepError, Problem, WireError
from protocol.fragments import Layout
from protocol.messages import CheckpointFragment
from protocol.spec.sections import check_pin
from protocol.wire import Payload

logger = logging.getLogger(__name__)


def catch_up(run: LiveRun, fragment: int) -> None:
    """Take the outer steps of `fragment` for all rounds that have ended.

    A step waits until its round has ended, because before that workers wait for the round's other fragments to be
    aggregated. Raises OuterstepError if the disk has lost what a step needs.
    """
    while (before := run.outer.states[fragment].round) < run.round:
        if not _is_complete(run.outer.files.path(fragment, before)):
            go_back_to_checkpoint(run, fragment)
            continue
        if _recent_delta(run, before, fragment) is None and not rebuild_delta_if_damaged(run, before, fragment):
            go_back_to_checkpoint(run, fragment, after=before)
            continue
        with run.traced("outer-step", before, fragment):
            _step(run, fragment)


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
    checkpointed = checkpointing.is_due(run, after)
    if checkpointed:
        checkpointing.write_fragment(run, after, fragment, target, digest)
    with run.change() as change:
        row = change.session.get_one(OuterStateRow, (run.id, fragment))
        row.round, row.state_digest = after, digest
        completed = checkpointed and checkpointing.record_if_complete(change, after)
        check_values(change, largest.largest, after, fragment)
        change.after_commit(partial(run.outer.set, fragment, State(after, digest)))
        change.wake(EVENTS)
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


def set_state_0(change: Change, digests: list[bytes]) -> None:
    """Make state 0 the outer state. Its files must be in place. `digests`: the state digest of each fragment."""
    run = change.run
    for fragment, digest in enumerate(digests):
        change.session.add(OuterStateRow(run_id=run.id, fragment=fragment, round=0, state_digest=digest))
    change.after_commit(partial(run.outer.begin, [State(0, digest) for digest in digests]))


def fetch_checkpoint(run: LiveRun, row: CheckpointFragmentRow) -> None:
    """Copy one fragment of a checkpoint to the local file of the outer state."""
    name = run.names.checkpoint(row.round, row.fragment, row.digest)
    run.blobs.fetch(name, run.outer.files.path(row.fragment, row.round))


def restore(run: LiveRun) -> None:
    """Bring the outer state to that of the open or next round, after a start.

    A state file that is missing or corrupt (it was not fsynced) is derived again from the newest intact checkpoint and
    the deltas after it.
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
    except (OuterstepError, OSError) as error:  # other runs continue; this one reports what it needs
        if disk_is_full(error) or isinstance(error, StoreOutage):
            raise  # not damage: the next start finds space or the store, or fails again
        logger.exception("%s: the outer state cannot be restored", run.name)
        outer.block(str(error))
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
        change.after_commit(partial(run.outer.set, fragment, State(round_, checkpoint.state_digest)))


def has_state_digest(path: Path, state_digest: bytes) -> bool:
    """Return True if the state file exists and has this state digest."""
    try:
        with StateReader(FileReader(path)) as state:
            return state.state_digest() == state_digest
    except (OSError, WireError):
        return False


# --- state 0, which a worker uploads ----------------------------------------------------------------------------------


def accept_state(
    run: LiveRun, layout: Layout, worker: str, fragment: int, body: Body
) -> tuple[CheckpointFragment, bool]:
    """Accept an uploaded fragment of state 0. Return it, and True if it is new.

    One worker makes state 0 from the seed in the run spec. Raises WireError if the bytes are not a payload, and
    Problem: invalid-payload (not the expected payload, or a momentum that is not +0), state-conflict, pin-mismatch.
    """
    elements = layout.elements[fragment]
    with body.payload() as payload:
        header = payload.header
        expected = ("state", run.name, 0, fragment, "fp32", 2 * elements)
        got = (header.kind, header.run, header.round, header.fragment, header.codec, header.elements)
        if got != expected:
            raise Problem("invalid-payload", f"the payload is {got}, expected {expected}")
        payload.check()
        canonical = run.context.data.scratch()
        try:
            state_digest = write_state(canonical, run.name, 0, fragment, elements, _halves(payload, elements))
            with run.lock:
                row, created = _accept(run, worker, fragment, canonical, state_digest)
                rows = [] if run.seeded else _uploaded(run)
                begins = len(rows) == len(layout.fragments)
                if begins:
                    _check_pinned(run, worker, [each.state_digest for each in rows])
                    for each in rows:
                        fetch_checkpoint(run, each)
                    with run.change() as change:
                        _begin(change, layout, [each.state_digest for each in rows])
            if begins:
                run.context.back_up()
        finally:
            canonical.unlink(missing_ok=True)
    return checkpointing.describe(row, layout), created


def _accept(
    run: LiveRun, worker: str, fragment: int, canonical: Path, state_digest: bytes
) -> tuple[CheckpointFragmentRow, bool]:
    with run.context.database.read() as session:
        row = session.get(CheckpointFragmentRow, (run.id, 0, fragment))
    if row is not None and row.state_digest == state_digest:
        return row, False
    if run.seeded or run.members.seeder != worker:
        raise Problem("state-conflict", f"state 0 of the run {run.name} is not for {worker} to seed")
    run.members.note_seeder_upload(run.context.clock())
    return checkpointing.write_fragment(run, 0, fragment, canonical, state_digest), True


def _uploaded(run: LiveRun) -> list[CheckpointFragmentRow]:
    with run.context.database.read() as session:
        return session.query(CheckpointFragmentRow).filter_by(run_id=run.id, round=0).order_by("fragment").all()


def _check_pinned(run: LiveRun, worker: str, digests: list[bytes]) -> None:
    """Raise Problem `pin-mismatch` if the spec pins a different state 0. Then another worker is asked to upload it."""
    try:
        check_pin("state", run.spec.pins.state, model_digest(digests).hex())
    except Problem as problem:
        with run.change() as change:
            change.session.execute(delete(CheckpointFragmentRow).where(CheckpointFragmentRow.run_id == run.id))
            change.record("seeder-refused", f"state 0 of {worker} was rejected: {problem.detail}", worker=worker)
            change.after_commit(partial(run.members.dismiss_seeder, run.context.clock()))
            change.wake()
        raise


def _begin(change: Change, layout: Layout, digests: list[bytes]) -> None:
    """Start the run from state 0, once all its fragments are uploaded and in place."""
    digest, now = model_digest(digests), change.run.context.now()
    change.session.add(CheckpointRow(run_id=change.run.id, round=0, created_at=now, state_digest=digest))
    message = f"state 0 was uploaded: {layout.total_elements} parameters in {counted(len(digests), 'fragment')}"
    change.record("seeded", message)
    set_state_0(change, digests)
    change.wake()


def _halves(payload: Payload, elements: int) -> Iterator[tuple[F32, F32]]:
    """Yield the uploaded state 0 as chunks (θ, u), with one in memory at a time.

    Raises Problem `invalid-payload` if a value of θ is out of bounds or a value of u is not +0. In the payload u
    follows θ, so the error may come at the end.
    """
    start = 0
    for index, n in enumerate(payload.chunks):
        values = np.empty(n, np.float32)
        payload.codec.decode(payload.chunk(index), values)
        theta, momentum = np.split(values, [max(elements - start, 0)])
        if momentum.view(np.uint32).any():
            raise Problem("invalid-payload", "the momentum u of state 0, the second half of the values, is not +0")
        if theta.size:
            if not np.abs(theta).max() <= BOUND:
                raise Problem("invalid-payload", f"a value of state 0 is {np.abs(theta).max():.3g}, beyond {BOUND:g}")
            yield theta, np.zeros_like(theta)
        start += n
