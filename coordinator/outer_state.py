"""The coordinator's own outer state, and the checkpoints taken of it.

After a delta is published, the coordinator takes the same outer step as every worker, by the same decoded bytes. The
state is derived (a checkpoint and the deltas after it give it again), so it need not be fsynced; checkpoints are.
"""

import os
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import retention
from coordinator.files import PayloadFile, file_digest, make_durable
from coordinator.live_run import LiveRun
from coordinator.state_file import StateReader, stepped, write_state
from coordinator.tables import CheckpointFragmentRow, CheckpointRow, OuterStateRow
from protocol.digest import model_digest
from protocol.errors import WireError
from protocol.messages import CheckpointFragment


def catch_up(run: LiveRun, fragment: int) -> None:
    """Take the outer steps of `fragment` by the rounds that are over and that the coordinator has not taken yet.

    Not before the round is over: until then, aggregating its other fragments is what workers wait for.
    """
    while run.outer[fragment][0] < run.round:
        _step(run, fragment)


def _step(run: LiveRun, fragment: int) -> None:
    """One outer step, by the delta of the round that the state belongs to."""
    before = run.outer[fragment][0]
    after = before + 1
    target = run.files.state(fragment, after)
    with (
        StateReader(run.files.state(fragment, before)) as state,
        PayloadFile(run.files.delta(before, fragment)) as delta,
    ):
        digest = write_state(target, run.name, after, fragment, state.elements, stepped(state, delta, run.spec.outer))
    checkpointed = after % run.spec.checkpoints.every_rounds == 0 or after == run.spec.sync.rounds
    if checkpointed:
        keep_checkpoint_fragment(run, after, fragment, target, digest)
    with run.lock:
        with run.world.database.write() as session:
            row = session.get_one(OuterStateRow, (run.id, fragment))
            row.round, row.state_digest = after, digest
            completed = checkpointed and _complete_checkpoint(run, session, after)
        run.outer[fragment] = (after, digest)
        run.stepped.notify_all()
        if completed:
            retention.clean(run)
    run.ring()


def set_rows(run: LiveRun, session: Session, round_: int, digests: list[bytes]) -> None:
    """The rows of a whole outer state, at its beginning."""
    for fragment, digest in enumerate(digests):
        session.add(OuterStateRow(run_id=run.id, fragment=fragment, round=round_, state_digest=digest))


def copy_checkpoint(run: LiveRun, round_: int) -> None:
    """Make the files of checkpoint `round_` the current outer state."""
    assert run.layout is not None
    for fragment in range(len(run.layout.fragments)):
        _link(run.files.checkpoint(round_, fragment), run.files.state(fragment, round_))


def keep_checkpoint_fragment(
    run: LiveRun, round_: int, fragment: int, state: Path, state_digest: bytes
) -> CheckpointFragmentRow:
    """Make one fragment of a checkpoint durable, file first, then row."""
    temporary = run.world.data.incoming()
    _link(state, temporary)
    size, digest = state.stat().st_size, file_digest(state)
    make_durable(temporary, run.files.checkpoint(round_, fragment))
    with run.world.database.write() as session:
        return session.merge(
            CheckpointFragmentRow(
                run_id=run.id, round=round_, fragment=fragment, size=size, digest=digest, state_digest=state_digest
            )
        )


def _complete_checkpoint(run: LiveRun, session: Session, round_: int) -> bool:
    """The checkpoint exists once all of its fragments do; whether that is now. Then older ones may go.

    In the transaction of the step, or a crash between the two would leave the last checkpoint incomplete for ever.
    """
    assert run.layout is not None
    rows = session.scalars(
        select(CheckpointFragmentRow)
        .where(CheckpointFragmentRow.run_id == run.id, CheckpointFragmentRow.round == round_)
        .order_by(CheckpointFragmentRow.fragment)
    ).all()
    if len(rows) < len(run.layout.fragments) or session.get(CheckpointRow, (run.id, round_)) is not None:
        return False
    digest = model_digest(row.state_digest for row in rows)
    session.add(CheckpointRow(run_id=run.id, round=round_, created_at=run.world.now(), state_digest=digest))
    run.record(session, "checkpoint", f"checkpoint {round_} is complete", round=round_)
    return True


def describe(run: LiveRun, row: CheckpointFragmentRow) -> CheckpointFragment:
    assert run.layout is not None
    return CheckpointFragment(
        fragment=row.fragment,
        elements=run.layout.elements[row.fragment],
        bytes=row.size,
        digest=row.digest.hex(),
        state_digest=row.state_digest.hex(),
    )


def restore(run: LiveRun) -> None:
    """After a start: bring the outer state to where the published deltas say it is.

    A state file that is missing or not what its digest says (it was not fsynced) is derived again from the newest
    checkpoint; then the deltas that were published meanwhile are applied.
    """
    assert run.layout is not None
    with run.world.database.read() as session:
        newest = session.scalars(
            select(CheckpointRow.round)
            .where(CheckpointRow.run_id == run.id)
            .order_by(CheckpointRow.round.desc())
            .limit(1)
        ).one_or_none()
        rows = session.scalars(
            select(OuterStateRow).where(OuterStateRow.run_id == run.id).order_by(OuterStateRow.fragment)
        ).all()
    if newest is None:
        return
    run.outer = [(row.round, row.state_digest) for row in rows]
    for fragment, (round_, digest) in enumerate(run.outer):
        if not _holds(run.files.state(fragment, round_), digest):
            _rederive(run, fragment, newest)
        catch_up(run, fragment)
    current = {run.files.state(fragment, round_) for fragment, (round_, _) in enumerate(run.outer)}
    for path in (run.files.root / "state").iterdir():
        if path not in current:
            path.unlink()


def _rederive(run: LiveRun, fragment: int, checkpoint: int) -> None:
    _link(run.files.checkpoint(checkpoint, fragment), run.files.state(fragment, checkpoint))
    with run.world.database.write() as session:
        saved = session.get_one(CheckpointFragmentRow, (run.id, checkpoint, fragment))
        row = session.get_one(OuterStateRow, (run.id, fragment))
        run.record(
            session,
            "rederived",
            f"fragment {fragment} of the outer state is derived again from checkpoint {checkpoint}",
        )
        row.round, row.state_digest = checkpoint, saved.state_digest
    run.outer[fragment] = (checkpoint, saved.state_digest)


def _holds(path: Path, state_digest: bytes) -> bool:
    try:
        with StateReader(path) as state:
            return state.state_digest() == state_digest
    except (FileNotFoundError, WireError):
        return False


def _link(source: Path, target: Path) -> None:
    """A second name for an immutable file; nothing is copied."""
    target.unlink(missing_ok=True)
    os.link(source, target)
