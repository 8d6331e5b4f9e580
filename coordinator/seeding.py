"""State 0: made by one worker, from the seed in the run spec, and uploaded fragment by fragment."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sqlalchemy import delete

from coordinator import assigning, checkpointing, outer_state
from coordinator.files import PayloadFile
from coordinator.live_run import LiveRun
from coordinator.state_file import F32, write_state
from coordinator.tables import CheckpointFragmentRow, CheckpointRow
from protocol.digest import model_digest
from protocol.errors import Problem
from protocol.messages import CheckpointFragment


def appoint(run: LiveRun, worker: str) -> bool:
    """Whether `worker` is the one to seed state 0. The first live worker that asks is; a successor starts afresh."""
    if run.seeder is None:
        with run.world.database.write() as session:
            session.execute(delete(CheckpointFragmentRow).where(CheckpointFragmentRow.run_id == run.id))
            run.record(session, "seeding", f"{worker} uploads state 0", worker=worker)
        run.seeder = worker
    return run.seeder == worker


def accept_state(run: LiveRun, worker: str, fragment: int, upload: Path) -> tuple[CheckpointFragment, bool]:
    """Keep an uploaded fragment of state 0; whether it is new. WireError for bytes that are not such a payload, Problem
    `invalid-payload` where it is another one or its momentum is not +0."""
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
    """The uploaded state 0 in pieces (θ, u), a chunk in memory at a time. Problem `invalid-payload` unless all of u is
    +0; that follows θ in the payload, so it is known at the end."""
    start = 0
    for index, n in enumerate(payload.chunks):
        values = np.empty(n, np.float32)
        payload.codec.decode(payload.chunk(index), values)
        theta, momentum = np.split(values, [max(elements - start, 0)])
        if momentum.view(np.uint32).any():
            raise Problem("invalid-payload", "the momentum u of state 0, the second half of the values, is not +0")
        if theta.size:
            yield theta, np.zeros_like(theta)
        start += n
