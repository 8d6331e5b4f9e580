"""State 0: made by one worker, from the seed in the run spec, and uploaded fragment by fragment."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sqlalchemy import delete

from coordinator.runs import assigning
from coordinator.runs.live_run import LiveRun
from coordinator.store.files import PayloadFile
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow
from coordinator.sync import checkpointing, outer_state
from coordinator.sync.state_file import F32, write_state
from protocol.digest import model_digest
from protocol.errors import Problem
from protocol.messages import CheckpointFragment
from protocol.wire import CHUNK_ELEMENTS, chunk_sizes


def appoint(run: LiveRun, worker: str) -> bool:
    """Whether `worker` is the one to seed state 0. The first live worker that asks is; a successor starts afresh."""
    if run.seeder is None:
        with run.world.database.write() as session:
            session.execute(delete(CheckpointFragmentRow).where(CheckpointFragmentRow.run_id == run.id))
            run.record(session, "seeding", f"{worker} uploads state 0", worker=worker)
        run.seeder = worker
    return run.seeder == worker


def accept_state(run: LiveRun, worker: str, fragment: int, upload: Path) -> tuple[CheckpointFragment, bool]:
    """Keep an uploaded fragment of state 0; whether it is new. WireError for bytes that are not such a payload."""
    assert run.layout is not None
    elements = run.layout.elements[fragment]
    with PayloadFile(upload) as payload:
        header = payload.header
        expected = ("state", run.name, 0, fragment, "fp32", 2 * elements)
        got = (header.kind, header.run, header.round, header.fragment, header.codec, header.elements)
        if got != expected:
            raise Problem("invalid-payload", f"the payload is {got}, expected {expected}")
        payload.check()
        canonical = run.world.data.incoming()
        try:
            state_digest = write_state(canonical, run.name, 0, fragment, elements, _halves(payload, elements))
            with run.lock:
                return _keep(run, worker, fragment, canonical, state_digest)
        finally:
            canonical.unlink(missing_ok=True)


def _keep(
    run: LiveRun, worker: str, fragment: int, canonical: Path, state_digest: bytes
) -> tuple[CheckpointFragment, bool]:
    assert run.layout is not None
    with run.world.database.read() as session:
        row = session.get(CheckpointFragmentRow, (run.id, 0, fragment))
    created = row is None or row.state_digest != state_digest
    if created:
        if run.seeded or run.seeder != worker:
            raise Problem("state-conflict", f"state 0 of the run {run.name} is not for {worker} to seed")
        row = checkpointing.keep_fragment(run, 0, fragment, canonical, state_digest)
    if not run.seeded:
        _complete(run)
    assert row is not None
    return checkpointing.describe(run, row), created


def _complete(run: LiveRun) -> None:
    """State 0 is there once all of its fragments are. Holds the lock."""
    assert run.layout is not None
    with run.world.database.read() as session:
        rows = session.query(CheckpointFragmentRow).filter_by(run_id=run.id, round=0).order_by("fragment").all()
    if len(rows) == len(run.layout.fragments):
        outer_state.copy_checkpoint(run, 0)
        with run.world.database.write() as session:
            digest = model_digest(other.state_digest for other in rows)
            session.add(CheckpointRow(run_id=run.id, round=0, created_at=run.world.now(), state_digest=digest))
            run.record(
                session, "seeded", f"state 0 is there: {run.layout.total_elements} parameters in {len(rows)} fragments"
            )
            outer_state.set_rows(run, session, 0, [other.state_digest for other in rows])
        run.outer = [(0, other.state_digest) for other in rows]
        assigning.try_open(run)
        run.wake()


def _halves(payload: PayloadFile, elements: int) -> Iterator[tuple[F32, F32]]:
    """The uploaded state as chunks (θ, u); the payload's own chunks may lie across the border between the two."""
    values = np.empty(2 * elements, np.float32)
    payload.decode(values)
    start = 0
    for n in chunk_sizes(elements, CHUNK_ELEMENTS):
        yield values[start : start + n], values[elements + start : elements + start + n]
        start += n
