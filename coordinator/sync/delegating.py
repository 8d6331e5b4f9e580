"""Work that the leader delegates to aggregators: it describes the work on a fragment, and checks each result against
its own record. Only a coordinator that leads on PostgreSQL has a `Delegation`; another one asks nobody. `aggregate` and
`advance` return None if this process must do the work itself."""

from sqlalchemy import select

from coordinator.aggregation.delegation import Delegation
from coordinator.aggregation.fragment import head_of
from coordinator.aggregation.residual import residual_bytes
from coordinator.aggregation.tasks import Advance, Advanced, Aggregate, Aggregated, Origin, StateRef
from coordinator.run.live_run import LiveRun
from coordinator.store.tables import CheckpointFragmentRow, CheckpointRow, FragmentRow
from protocol.codecs import CODECS


def is_possible(run: LiveRun) -> bool:
    """Return True if there are aggregators."""
    return run.context.delegation is not None and run.context.delegation.is_possible


def aggregate(run: LiveRun, delegation: Delegation, task: Aggregate) -> Aggregated | None:
    """Let an aggregator do the task. May raise like `Delegation.ask`."""
    found = None if task.usual is None and task.state is None else delegation.ask(task)
    if found is None:
        return None
    wrong = _wrong_delta(run, task, found) if isinstance(found, Aggregated) else "it is no delta"
    if wrong or not isinstance(found, Aggregated):
        delegation.refuse(task, wrong)
        return None
    return found


def _wrong_delta(run: LiveRun, task: Aggregate, found: Aggregated) -> str:
    """Return what is wrong with the verdicts or with the delta's header; empty if nothing is."""
    factors = {worker: verdict.factor for worker, verdict in found.verdicts.items()}
    if factors.keys() != task.contributions.keys():
        return "its verdicts are not about the contributions"
    if not all(0 <= factor <= 1 for factor in factors.values()) or not any(factors.values()):
        return "a factor is not within 0 and 1, or all are 0"
    head = head_of(task, factors, found.frame_bytes)
    name = run.names.delta(task.round, task.fragment, found.digest)
    size = run.blobs.stat(name)
    if size != found.size or size != len(head) + sum(found.frame_bytes):
        return f"the store has {'nothing' if size is None else f'{size} bytes'} of that name"
    if wrong := _wrong_residual(run, task, found):
        return wrong
    try:
        same = _beginning(run, name, len(head)) == head
    except FileNotFoundError:
        return "the store has lost it"
    return "" if same else "its header is not of these contributions"


def _wrong_residual(run: LiveRun, task: Aggregate, found: Aggregated) -> str:
    """Return what is wrong with the delta's residual; empty if nothing is."""
    if (found.residual is not None) != CODECS[task.sync.download_codec].error_feedback:
        return "it has a residual although its codec has no error feedback, or lacks one"
    if found.residual is None:
        return ""
    size = run.blobs.stat(run.names.residual(task.round, task.fragment, found.residual.digest))
    if size == found.residual.size == residual_bytes(task.elements):
        return ""
    return f"the store has {'nothing' if size is None else f'{size} bytes'} of the delta's residual"


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


def advance(run: LiveRun, delegation: Delegation, fragment: int, round_: int, *, checkpoint: bool) -> Advanced | None:
    """Let an aggregator derive the fragment's state of `round_`, and put it into the store if `checkpoint`. May raise
    like `Delegation.ask`."""
    if not delegation.is_possible or run.model is None:
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
    found = delegation.ask(task)
    if found is None:
        return None
    wrong = _wrong_state(run, task, found) if isinstance(found, Advanced) else "it is no state"
    if wrong or not isinstance(found, Advanced):
        delegation.refuse(task, wrong)
        return None
    return found


def _wrong_state(run: LiveRun, task: Advance, found: Advanced) -> str:
    """Return what is wrong with a state; empty if nothing is."""
    if task.known.round == task.round and found.digest != task.known.digest:
        return "its digest is not the recorded one"
    if (found.checkpoint is None) == task.checkpoint:
        return "it has a checkpoint that was not asked for, or none"
    if found.checkpoint is not None:
        size = run.blobs.stat(run.names.checkpoint(task.round, task.fragment, found.checkpoint.digest))
        if size != found.checkpoint.size:
            return f"the store has {'nothing' if size is None else f'{size} bytes'} of its checkpoint"
    return ""


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
