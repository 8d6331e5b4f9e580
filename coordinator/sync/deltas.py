"""Deltas: made from the contributions, and made again, byte for byte, if the stored one is corrupt."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from sqlalchemy import select

from coordinator.run.live_run import LiveRun
from coordinator.run.open_round import AcceptedContribution
from coordinator.store.payloads import HashedPayload, ReadBuffer, StoredPayload, fault_in, has_digest
from coordinator.store.tables import ContributionRow, FragmentRow
from coordinator.sync import retention
from coordinator.sync.aggregating import aggregate
from outerstep.common.files import aligned
from protocol.digest import Buffer, digest
from protocol.errors import OuterstepError, WireError
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader, Contributor, DeltaHeader, Payload, pack_header


class ContributionsLost(OuterstepError):
    """Raised when the disk no longer has the contributions of `workers` as they were acknowledged."""

    def __init__(self, workers: list[str]) -> None:
        super().__init__(f"the disk has lost the contribution of {', '.join(workers)}")
        self.workers = workers


def make_delta(
    run: LiveRun,
    round_: int,
    fragment: int,
    contributed: Mapping[str, AcceptedContribution],
    contents: Mapping[str, memoryview],
    base: bytes,
    factors: Mapping[str, float],
) -> memoryview:
    """Aggregate the contributions into a delta, a payload in memory. Raises ContributionsLost.

    `factors` are of the weights, by worker: one of 0 is left out. At least one is not.

    Those whose payload is in `contents` come from memory; the blobs of the others are read once, and their digests
    checked in passing. The same contributions and `base` always give the same bytes.
    """
    in_order = sorted((worker, each) for worker, each in contributed.items() if factors[worker] > 0)
    buffer = ReadBuffer()
    stored: dict[str, HashedPayload] = {}
    try:
        with ExitStack() as stack:
            payloads: list[tuple[Payload, int]] = []
            for worker, each in in_order:
                if worker in contents:
                    payloads.append((Payload.from_bytes(contents[worker]), each.tokens))
                    continue
                reader = run.blobs.open(run.names.contribution(round_, fragment, worker, each.digest))
                stored[worker] = stack.enter_context(HashedPayload(reader, buffer))
                payloads.append((stored[worker], each.tokens))
            sync = run.spec.sync
            frames = aggregate(
                payloads,
                sync.download_codec,
                zstd=sync.zstd,
                rule=sync.aggregation,
                factors=[factors[worker] for worker, _ in in_order],
            )
            lost = [worker for worker, each in stored.items() if not each.is_intact(contributed[worker].digest)]
    except (OSError, WireError, ValueError, LookupError):  # a blob is missing, unreadable or corrupt
        lost = lost_contributions(run, round_, fragment, contributed)
        if not lost:
            raise
    if lost:
        raise ContributionsLost(lost)
    head = pack_header(
        DeltaHeader(
            run=run.name,
            round=round_,
            fragment=fragment,
            codec=run.spec.sync.download_codec,
            elements=payloads[0][0].header.elements,
            chunk_elements=CHUNK_ELEMENTS,
            frame_bytes=[len(frame) for frame in frames],
            base=base,
            contributors=[
                Contributor(worker=worker, tokens=each.tokens, factor=factors[worker]) for worker, each in in_order
            ],
        )
    )
    return _concatenate([head, *frames])


def _concatenate(parts: Sequence[Buffer]) -> memoryview:
    content, start = aligned(sum(len(part) for part in parts)), 0
    for part in parts:
        content[start : start + len(part)] = memoryview(part).cast("B")
        start += len(part)
    return content


def lost_contributions(
    run: LiveRun, round_: int, fragment: int, contributed: Mapping[str, AcceptedContribution]
) -> list[str]:
    """Return, in worker-id order, the workers whose contribution's blob is missing or corrupt."""
    return [
        worker
        for worker, each in sorted(contributed.items())
        if not has_digest(run.blobs, run.names.contribution(round_, fragment, worker, each.digest), each.digest)
    ]


def mend_delta(run: LiveRun, round_: int, fragment: int) -> bool:
    """Check the published delta's blob; if it is missing or corrupt, make it again from the contributions.

    Returns False if that is impossible. Then the blob is deleted: a checkpoint covers its round, and workers that ask
    for it are sent there.
    """
    with run.context.database.read() as session:
        row = session.get(FragmentRow, (run.id, round_, fragment))
    if row is None or row.delta_digest is None:
        return True
    name = run.names.delta(round_, fragment, row.delta_digest)
    damage = fault_in(run.blobs, name, row.delta_digest)
    if damage is None:
        return True
    with run.context.database.read() as session:
        contributions = session.scalars(
            select(ContributionRow).where(
                ContributionRow.run_id == run.id, ContributionRow.round == round_, ContributionRow.fragment == fragment
            )
        ).all()
    with run.lock:
        if not retention.keeps_delta(run, round_) or (round_, fragment) in run.outer.lost_deltas:
            return False  # deleted by the retention rule meanwhile, or recorded before
    weights = row.contributors or {}
    contributed = {
        each.worker: AcceptedContribution(weights[each.worker], each.digest)
        for each in contributions
        if each.worker in weights
    }
    mended = len(contributed) == len(weights) and _make_again(run, round_, fragment, contributed, row)
    if not mended:
        run.blobs.delete(name)
        run.outer.lose_delta(round_, fragment)
    where = f"the delta of round {round_}, fragment {fragment}"
    with run.change() as change:
        if mended:
            message = f"{where} was {damage} on disk; it was made again from its contributions, to the same bytes"
            change.record("mended", message, round=round_, fragment=fragment)
        else:
            message = f"{where} is {damage} on disk and its contributions are gone; workers recover from a checkpoint"
            change.record("corrupt", message, round=round_, fragment=fragment)
    return mended


def _make_again(
    run: LiveRun, round_: int, fragment: int, contributed: Mapping[str, AcceptedContribution], row: FragmentRow
) -> bool:
    expected = row.delta_digest
    assert expected is not None
    if not contributed or lost_contributions(run, round_, fragment, contributed):
        return False
    worker, first = min(contributed.items())
    with StoredPayload(run.blobs.open(run.names.contribution(round_, fragment, worker, first.digest))) as payload:
        assert isinstance(payload.header, ContributionHeader)
        base = payload.header.base  # the run's state of that round: another one is refused
    factors = {worker: row.verdicts[worker]["factor"] for worker in contributed}
    delta = make_delta(run, round_, fragment, contributed, {}, base, factors)
    if digest(delta) != expected:
        return False
    name = run.names.delta(round_, fragment, expected)
    run.blobs.delete(name)
    return run.blobs.put(name, delta)
