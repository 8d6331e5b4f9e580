"""The file of a delta: made from the contributions, and made again, byte for byte, if it is corrupt on disk."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from coordinator.runs.live_run import LiveRun
from coordinator.runs.open_round import AcceptedContribution
from coordinator.store.files import HashedPayloadFile, PayloadFile, ReadBuffer, has_digest, make_durable
from coordinator.store.tables import ContributionRow, FragmentRow
from coordinator.sync import retention
from coordinator.sync.aggregating import aggregate
from protocol.digest import Buffer, digest
from protocol.direct import aligned, write_new
from protocol.errors import OuterstepError, WireError
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader, Contributor, DeltaHeader, Payload, pack_header


class ContributionsLost(OuterstepError):
    """Raised when the disk no longer has the contributions of `workers` as they were acknowledged."""

    def __init__(self, workers: list[str]) -> None:
        super().__init__(f"the disk has lost the contribution of {', '.join(workers)}")
        self.workers = workers


@dataclass(frozen=True)
class DeltaFile:
    """A delta in a new file under `incoming/`, not yet durable, and in memory as `content`."""

    path: Path
    digest: bytes
    content: memoryview


def write_delta(
    run: LiveRun,
    round_: int,
    fragment: int,
    contributed: Mapping[str, AcceptedContribution],
    contents: Mapping[str, memoryview],
    base: bytes,
) -> DeltaFile:
    """Aggregate the contributions into a delta file. Raises ContributionsLost.

    Those whose payload is in `contents` come from memory; the files of the others are read once, and their digests
    checked in passing. The same contributions and `base` always give the same bytes.
    """
    in_order, buffer = sorted(contributed.items()), ReadBuffer()
    files: dict[str, HashedPayloadFile] = {}
    try:
        with ExitStack() as stack:
            payloads: list[tuple[Payload, int]] = []
            for worker, each in in_order:
                if worker in contents:
                    payloads.append((Payload.from_bytes(contents[worker]), each.tokens))
                    continue
                path = run.files.contribution(round_, fragment, worker, each.digest)
                files[worker] = stack.enter_context(HashedPayloadFile(path, buffer))
                payloads.append((files[worker], each.tokens))
            frames = aggregate(payloads, run.spec.sync.download_codec, zstd=run.spec.sync.zstd)
            lost = [worker for worker, file in files.items() if not file.is_intact(contributed[worker].digest)]
    except (OSError, WireError, ValueError, LookupError):  # a file is missing, unreadable or corrupt
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
            contributors=[Contributor(worker=worker, tokens=each.tokens) for worker, each in in_order],
        )
    )
    content = _concatenate([head, *frames])
    temporary = run.world.data.incoming()
    try:
        write_new(temporary, content)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return DeltaFile(temporary, digest(content), content)


def _concatenate(parts: Sequence[Buffer]) -> memoryview:
    content, start = aligned(sum(len(part) for part in parts)), 0
    for part in parts:
        content[start : start + len(part)] = memoryview(part).cast("B")
        start += len(part)
    return content


def lost_contributions(
    run: LiveRun, round_: int, fragment: int, contributed: Mapping[str, AcceptedContribution]
) -> list[str]:
    """Return, in worker-id order, the workers whose contribution's file is missing or corrupt."""
    return [
        worker
        for worker, each in sorted(contributed.items())
        if not has_digest(run.files.contribution(round_, fragment, worker, each.digest), each.digest)
    ]


def mend_delta(run: LiveRun, round_: int, fragment: int) -> bool:
    """Check the published delta's file; if it is corrupt, make it again from the contributions.

    Returns False if that is impossible. Then the file is deleted: a checkpoint covers its round, and workers that ask
    for it are sent there.
    """
    with run.world.database.read() as session:
        row = session.get(FragmentRow, (run.id, round_, fragment))
    path = run.files.delta(round_, fragment)
    if row is None or row.delta_digest is None or has_digest(path, row.delta_digest):
        return True
    with run.world.database.read() as session:
        contributions = session.scalars(
            select(ContributionRow).where(
                ContributionRow.run_id == run.id, ContributionRow.round == round_, ContributionRow.fragment == fragment
            )
        ).all()
    with run.lock:
        if not retention.keeps_delta(run, round_) or (round_, fragment) in run.lost_deltas:
            return False  # deleted by the retention rule meanwhile, or recorded before
    contributed = {
        each.worker: AcceptedContribution(each.tokens, each.digest)
        for each in contributions
        if each.worker in (row.contributors or {})
    }
    mended = len(contributed) == len(row.contributors or {}) and _make_again(
        run, round_, fragment, contributed, row.delta_digest
    )
    if not mended:
        path.unlink(missing_ok=True)
        run.lost_deltas.add((round_, fragment))
    where = f"the delta of round {round_}, fragment {fragment}"
    with run.change() as change:
        if mended:
            message = f"{where} was corrupt on disk; it was made again from its contributions, to the same bytes"
            change.record("mended", message, round=round_, fragment=fragment)
        else:
            message = f"{where} is corrupt on disk and its contributions are gone; workers recover from a checkpoint"
            change.record("corrupt", message, round=round_, fragment=fragment)
    return mended


def _make_again(
    run: LiveRun, round_: int, fragment: int, contributed: Mapping[str, AcceptedContribution], expected: bytes
) -> bool:
    if not contributed or lost_contributions(run, round_, fragment, contributed):
        return False
    worker, first = min(contributed.items())
    with PayloadFile(run.files.contribution(round_, fragment, worker, first.digest)) as payload:
        assert isinstance(payload.header, ContributionHeader)
        base = payload.header.base  # the run's state of that round: another one is refused
    delta = write_delta(run, round_, fragment, contributed, {}, base)
    try:
        if delta.digest == expected:
            make_durable(delta.path, run.files.delta(round_, fragment))
        return delta.digest == expected
    finally:
        delta.path.unlink(missing_ok=True)
