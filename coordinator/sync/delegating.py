"""What is left to aggregators: the leader describes the work on a fragment, and checks what it is told against its own
record. Functions return None if this process must do the work itself."""

import logging

from sqlalchemy import select

from coordinator.aggregation.fragment import head_of
from coordinator.aggregation.tasks import Advance, Advanced, Aggregate, Aggregated, Origin, StateRef
from coordinator.run.live_run import LiveRun
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, FragmentRow

logger = logging.getLogger(__name__)


def is_possible(run: LiveRun) -> bool:
    """Return True if there are aggregators."""
    return run.context.delegation is not None and run.context.delegation.is_possible


def aggregate(run: LiveRun, task: Aggregate) -> Aggregated | None:
    """Let an aggregator do the task. May raise like `Delegation.ask`."""
    if run.context.delegation is None or (task.bounded and task.state is None):
        return None
    found = run.context.delegation.ask(task)
    if not isinstance(found, Aggregated):
        return None
    if wrong := _wrong_delta(run, task, found):
        logger.warning("%s: an aggregator's delta of round %d is refused: %s", run.name, task.round, wrong)
        return None
    return found


def _wrong_delta(run: LiveRun, task: Aggregate, found: Aggregated) -> str:
    """Return what is wrong with a delta and its verdicts, as far as the header tells; empty if nothing is."""
    factors = {worker: verdict.factor for worker, verdict in found.verdicts.items()}
    if factors.keys() != task.contributions.keys():
        return "its verdicts are not about the contributions"
    if not all(0 <= factor <= 1 for factor in factors.values()) or not any(factors.values()):
        return "a factor is not within 0 and 1, or all are 0"
    assert run.model is not None, "a round has a layout"
    head = head_of(task, factors, run.model.layout.elements[task.fragment], found.frame_bytes)
    name = run.names.delta(task.round, task.fragment, found.digest)
    size = run.blobs.stat(name)
    if size != found.size or size != len(head) + sum(found.frame_bytes):
        return f"the store has {'nothing' if size is None else f'{size} bytes'} of that name"
    try:
        same = _beginning(run, name, len(head)) == head
    except FileNotFoundError:
        return "the store has lost it"
    return "" if same else "its header is not of these contributions"


def _beginning(run: LiveRun, name: str, length: int) -> bytes:
    """Return the first bytes of a blob, and read no more of it if the store allows that."""
    if run.blobs.direct is not None:
        return run.blobs.direct.beginning(name, length)
    with run.blobs.open(name, fresh=True) as reader:
        memory = memoryview(bytearray(length))
        return bytes(memory[: reader.read_into(memory, 0)])


def checkpoint_blob(run: LiveRun, round_: int, fragment: int) -> bytes | None:
    """Return the digest of a fragment's blob in the checkpoint of `round_`; None if there is no such checkpoint."""
    with run.context.database.read() as session:
        if session.get(CheckpointRow, (run.id, round_)) is None:
            return None
        return session.get_one(CheckpointFragmentRow, (run.id, round_, fragment)).digest


def advance(run: LiveRun, fragment: int, round_: int, *, checkpoint: bool) -> Advanced | None:
    """Let an aggregator derive the fragment's state of `round_`, and put it into the store if `checkpoint`. May raise
    like `Delegation.ask`."""
    if run.context.delegation is None or not run.context.delegation.is_possible or run.model is None:
        return None
    origin = _origin(run, fragment, round_)
    known = run.outer.states[fragment]
    if origin is None or not origin.checkpoint.round <= known.round <= round_:
        return None
    task = Advance(
        run=run.name,
        fragment=fragment,
        elements=run.model.layout.elements[fragment],
        outer=run.spec.outer,
        origin=origin,
        known=StateRef(round=known.round, digest=known.digest),
        checkpoint=checkpoint,
    )
    found = run.context.delegation.ask(task)
    if not isinstance(found, Advanced) or (found.checkpoint is None) == checkpoint:
        return None
    if known.round == round_ and found.digest != known.digest:
        return None
    if found.checkpoint is not None:
        stored = run.blobs.stat(run.names.checkpoint(round_, fragment, found.checkpoint.digest))
        if stored != found.checkpoint.size:
            logger.warning("%s: the store has no such fragment of checkpoint %d: made here", run.name, round_)
            return None
    return found


def _origin(run: LiveRun, fragment: int, round_: int) -> Origin | None:
    """Return how the state of `round_` is derived from the newest checkpoint before it; None if the record has no
    checkpoint, or not all deltas after it. If all are damaged, an aggregator may still have a state since then."""
    row, complete = CheckpointFragmentRow, CheckpointRow
    with run.context.database.read() as session:
        saved = session.execute(
            select(row.round, row.digest, row.state_digest)
            .join(complete, (complete.run_id == row.run_id) & (complete.round == row.round))
            .where(row.run_id == run.id, row.fragment == fragment, row.round <= round_)
            .order_by(row.round.desc())
        ).all()
        if not saved:
            return None
        found = next((each for each in saved if each.round not in run.outer.damaged_checkpoints), saved[0])
        deltas = session.execute(
            select(FragmentRow.round, FragmentRow.delta_digest)
            .where(FragmentRow.run_id == run.id, FragmentRow.fragment == fragment)
            .where(FragmentRow.round >= found.round, FragmentRow.round < round_)
            .where(FragmentRow.delta_digest.is_not(None))
            .order_by(FragmentRow.round)
        ).all()
    if [each.round for each in deltas] != list(range(found.round, round_)):
        return None
    checkpoint = StateRef(round=found.round, digest=found.state_digest)
    return Origin(checkpoint=checkpoint, blob=found.digest, deltas=tuple(each.delta_digest for each in deltas))
