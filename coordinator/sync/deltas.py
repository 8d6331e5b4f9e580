"""Deltas: how they are aggregated from the contributions, rebuilt byte for byte if the stored one is corrupt, and
reported to workers that wait for them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from sqlalchemy import select

from coordinator.rounds.opening import status, waits_for
from coordinator.run.live_run import LiveRun
from coordinator.run.open_round import AcceptedContribution
from coordinator.store.blobs import StoreOutage
from coordinator.store.payloads import HashedPayload, ReadBuffer, StoredPayload, fault_in, has_digest
from coordinator.store.tables import ContributionRow, FragmentRow
from coordinator.sync import retention
from coordinator.sync.aggregating import aggregate
from outerstep.common.files import aligned
from protocol.digest import Buffer, digest
from protocol.errors import OuterstepError, Problem, WireError
from protocol.messages import FragmentState
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader, Contributor, DeltaHeader, Payload, pack_header


class ContributionsLost(OuterstepError):
    """The contributions of `workers` that were acknowledged are damaged or missing on the disk."""

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

    `factors` multiply the weights, by worker. A worker with factor 0 is left out; not all factors may be 0.

    Payloads in `contents` are used from memory. The other blobs are read once, and their digests are checked while
    reading. The same contributions and `base` always give the same bytes.
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
    except StoreOutage:
        raise  # nothing is known about the blobs
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
    """Return the workers whose contribution's blob is missing or corrupt, in worker-id order."""
    return [
        worker
        for worker, each in sorted(contributed.items())
        if not has_digest(run.blobs, run.names.contribution(round_, fragment, worker, each.digest), each.digest)
    ]


def rebuild_delta_if_damaged(run: LiveRun, round_: int, fragment: int) -> bool:
    """Check the blob of a published delta. If it is missing or corrupt, rebuild it from the contributions.

    Return False if that is impossible. Then the blob is deleted: a checkpoint covers its round, and workers that ask
    for the delta are sent to the checkpoint.
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
            return False  # deleted by retention in the meantime, or its loss is already recorded
    weights = row.contributors or {}
    contributed = {
        each.worker: AcceptedContribution(weights[each.worker], each.digest)
        for each in contributions
        if each.worker in weights
    }
    counted = {worker: each for worker, each in contributed.items() if row.verdicts[worker]["factor"] > 0}
    rebuilt = len(contributed) == len(weights) and _rebuild(run, round_, fragment, counted, row)
    if not rebuilt:
        run.blobs.delete(name)
        run.outer.mark_delta_lost(round_, fragment)
    where = f"the delta of round {round_}, fragment {fragment}"
    with run.change() as change:
        if rebuilt:
            message = f"{where} was {damage} on disk; it was rebuilt from its contributions, to the same bytes"
            change.record("mended", message, round=round_, fragment=fragment)
        else:
            message = f"{where} is {damage} on disk and its contributions are gone; workers recover from a checkpoint"
            change.record("corrupt", message, round=round_, fragment=fragment)
    return rebuilt


def _rebuild(
    run: LiveRun, round_: int, fragment: int, contributed: Mapping[str, AcceptedContribution], row: FragmentRow
) -> bool:
    expected = row.delta_digest
    assert expected is not None
    if not contributed or lost_contributions(run, round_, fragment, contributed):
        return False
    worker, first = min(contributed.items())
    with StoredPayload(run.blobs.open(run.names.contribution(round_, fragment, worker, first.digest))) as payload:
        assert isinstance(payload.header, ContributionHeader)
        base = payload.header.base  # the run's state of that round: contributions with another base are rejected
    factors = {worker: row.verdicts[worker]["factor"] for worker in contributed}
    delta = make_delta(run, round_, fragment, contributed, {}, base, factors)
    if digest(delta) != expected:
        return False
    name = run.names.delta(round_, fragment, expected)
    run.blobs.delete(name)
    return run.blobs.put(name, delta)


# --- status -----------------------------------------------------------------------------------------------------------


def status_from_memory(
    run: LiveRun, number: int, fragment: int, member: str | None, early: bool
) -> tuple[bool, bytes | str] | None:
    """Return the result of `status_under_lock` if memory alone has it; None if that needs the lock.

    Memory is enough for a delta that was just published, and for a member that has contributed to the open round or is
    about to. `member`: the worker that asks; None for a reader. `early`: its contribution is still on its way.
    """
    recent = run.outer.deltas.get((number, fragment))
    if recent is not None:
        return True, recent
    opening = run.open
    if opening is None or opening.number != number or run.ended:
        return None
    each = opening.fragments[fragment]
    if (member not in each.contributed and not early) or each.state is FragmentState.PUBLISHED:
        return None
    return False, f"round {number}, fragment {fragment}: {waits_for(run, each)}"


def status_under_lock(
    run: LiveRun, number: int, fragment: int, member: str | None, early: bool
) -> tuple[bool, bytes | str]:
    """Return (True, the delta's digest) once it is published; before that (False, what it waits for).

    A member asks for the delta of its own contribution. So unless it asks early, Problem `contribution-lost` is raised
    if the coordinator does not have that contribution: the disk has lost it, or the database was restored from a
    backup.
    """
    with run.lock:
        opening = run.open
        each = None if opening is None or opening.number != number else opening.fragments[fragment]
        if number >= run.round and (each is None or each.state is not FragmentState.PUBLISHED):
            if run.ended:
                raise Problem("run-ended", f"the run {run.name} is {run.state} and never published round {number}")
            if member is not None and number > run.round:
                raise Problem("round-not-open", f"the run is at round {run.round}; recover its state", round=run.round)
            if each is None:
                return False, f"round {number} is not open: {status(run)}"
            collecting = each.state is FragmentState.COLLECTING
            if member is not None and not early and collecting and member not in each.contributed:
                raise Problem(
                    "contribution-lost",
                    f"there is no contribution of {member} to round {number}, fragment {fragment}; send it again",
                )
            return False, f"round {number}, fragment {fragment}: {waits_for(run, each)}"
        with run.context.database.read() as session:
            row = session.get(FragmentRow, (run.id, number, fragment))
        if row is None:
            raise Problem("gone", f"round {number} is history; recover from the latest checkpoint")
        assert row.delta_digest is not None
        return True, row.delta_digest
