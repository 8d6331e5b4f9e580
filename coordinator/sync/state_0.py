"""State 0: one worker makes it from the seed in the run spec and uploads it, fragment by fragment."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from sqlalchemy import delete

from coordinator.aggregation.state_file import BOUND, F32, write_state
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.outer import State
from coordinator.store.payloads import Body
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, OuterStateRow
from coordinator.sync import checkpointing
from coordinator.sync.outer_state import fetch_checkpoint
from outerstep.common.quantities import counted
from protocol.digest import model_digest
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import CheckpointFragment
from protocol.spec.sections import check_pin
from protocol.wire import Payload


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
    blob = checkpointing.write_blob(run, 0, fragment, canonical)
    return checkpointing.record_fragment(run, fragment, State(0, state_digest), blob), True


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


def set_state_0(change: Change, digests: list[bytes]) -> None:
    """Make state 0 the outer state. Its files must be in place. `digests`: the state digest of each fragment."""
    run = change.run
    for fragment, digest in enumerate(digests):
        change.session.add(OuterStateRow(run_id=run.id, fragment=fragment, round=0, state_digest=digest))
    change.after_commit(partial(run.outer.begin, [State(0, digest) for digest in digests], here=True))
