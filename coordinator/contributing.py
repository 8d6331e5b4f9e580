"""Accepting a contribution: check it, make it durable, and only then acknowledge it.

Acknowledged means: it will be in the delta. The file is durable before its row is committed, and the row is committed
before the answer goes out; a refused upload leaves neither.
"""

from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import diverging, publishing
from coordinator.files import PayloadFile, make_durable
from coordinator.live_run import Contributed, LiveRun, worker_row
from coordinator.tables import AssignmentRow, ContributionRow, FragmentRow, LateContributionRow
from coordinator.units import consume_units
from protocol.errors import Problem
from protocol.messages import ContributionReply, FragmentState
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader

STEP_WAIT_S = 30.0


def accept(
    run: LiveRun, worker: str, round_: int, fragment: int, upload: Path, digest: bytes, size: int
) -> ContributionReply:
    """Keep the contribution in the file `upload`, or raise Problem or WireError. The caller deletes `upload`."""
    with PayloadFile(upload) as payload:
        header = payload.header
        if not isinstance(header, ContributionHeader):
            raise Problem("invalid-payload", f"the payload is a {header.kind}, expected a contribution")
        _check_header(run, worker, round_, fragment, header)
        payload.check()
    with run.lock:
        created = _is_new(run, worker, round_, fragment, digest)  # refuse before it costs an fsync
    if created:
        final = run.files.contribution(round_, fragment, worker, digest)
        make_durable(upload, final)  # without the lock, for the disk takes its time
        with run.lock:
            try:
                created = _commit(run, header, final, digest, size)
            except BaseException:
                # Two uploads of one contribution share a file: what the other one committed stays.
                if _known(run, worker, round_, fragment) != digest:
                    final.unlink(missing_ok=True)
                raise
    return ContributionReply(round=round_, fragment=fragment, digest=digest.hex(), created=created)


def _commit(run: LiveRun, header: ContributionHeader, file: Path, digest: bytes, size: int) -> bool:
    """Make the contribution in the durable `file` part of the round; whether it is new. Holds the lock."""
    _await_step(run, header.round, header.fragment)
    created = _is_new(run, header.worker, header.round, header.fragment, digest)  # much may have happened meanwhile
    if created:
        _check_base(run, header.round, header.fragment, header)
        if not file.is_file():
            raise Problem("not-ready", "the same contribution came twice at once; send it again", retry_after_s=1)
        _keep(run, header, digest, size)
        publishing.close_due(run)
    return created


def _check_header(run: LiveRun, worker: str, round_: int, fragment: int, header: ContributionHeader) -> None:
    assert run.layout is not None
    expected = {
        "run": run.name,
        "round": round_,
        "fragment": fragment,
        "worker": worker,
        "codec": run.spec.sync.upload_codec,
        "elements": run.layout.elements[fragment],
        "chunk_elements": CHUNK_ELEMENTS,
    }
    for field, value in expected.items():
        if getattr(header, field) != value:
            raise Problem("invalid-payload", f"header field {field} is {getattr(header, field)!r}, expected {value!r}")
    units = sum(stop - start for start, stop in header.units)
    if any(start >= stop for start, stop in header.units) or units == 0:
        raise Problem(
            "invalid-payload", f"header field units is {header.units[:3]}…: give at least one range, none of them empty"
        )
    most = units * run.spec.unit_tokens
    if header.tokens > most or header.tokens % run.spec.unit_tokens or (header.tokens < most and not header.carried):
        raise Problem(
            "invalid-payload",
            f"header field tokens is {header.tokens}; {units} units of {run.spec.unit_tokens} tokens are {most}, and "
            "only carried ones do not count",
        )


def _is_new(run: LiveRun, worker: str, round_: int, fragment: int, digest: bytes) -> bool:
    """Whether the contribution would be new; Problem where the round does not take it. Holds the lock."""
    known = _known(run, worker, round_, fragment)
    if known is not None:
        if known != digest:
            raise Problem(
                "contribution-conflict",
                f"{worker} has already contributed to round {round_}, fragment {fragment}: digest {known.hex()}",
            )
        return False
    closed = round_ < run.round
    if run.open is not None and round_ == run.round:
        closed = run.open.fragments[fragment].state is not FragmentState.COLLECTING
    if closed:
        _note_late(run, worker, round_, fragment)
        raise Problem(
            "round-closed",
            f"round {round_} closed for fragment {fragment} without {worker}; carry the work into round {run.round}",
            round=run.round,
            share=_share(run, round_, fragment),
        )
    if run.ended:
        raise Problem("run-ended", f"the run {run.name} is {run.state}")
    if run.open is None or round_ != run.round:
        raise Problem("round-not-open", f"round {round_} is not open: {run.why_not_open}")
    return True


def _known(run: LiveRun, worker: str, round_: int, fragment: int) -> bytes | None:
    """The digest of the contribution that was accepted. Holds the lock."""
    if run.open is not None and round_ == run.round:
        contributed = run.open.fragments[fragment].contributed.get(worker)
        return None if contributed is None else contributed.digest
    with run.world.database.read() as session:
        row = session.get(ContributionRow, (run.id, round_, fragment, worker))
    return None if row is None else row.digest


def _note_late(run: LiveRun, worker: str, round_: int, fragment: int) -> None:
    """The round's record says who was late, and by how much. Holds the lock."""
    key = (run.id, round_, fragment, worker)
    with run.world.database.read() as session:
        row = session.get(FragmentRow, key[:3])
        took_part = session.get(AssignmentRow, (run.id, round_, worker)) is not None
        noted = session.get(LateContributionRow, key) is not None
    if row is None or row.closed_at is None or not took_part or noted:
        return
    late_s = max(0.0, run.world.now() - row.closed_at)
    with run.world.database.write() as session:
        session.add(LateContributionRow(run_id=run.id, round=round_, fragment=fragment, worker=worker, late_s=late_s))


def _share(run: LiveRun, round_: int, fragment: int) -> float:
    """Which share of a past round's workers contributed to the fragment; 1 where its rows are gone by now."""
    with run.world.database.read() as session:
        row = session.get(FragmentRow, (run.id, round_, fragment))
        assigned = session.scalar(
            select(func.count()).where(AssignmentRow.run_id == run.id, AssignmentRow.round == round_)
        )
    if row is None or not row.contributors or not assigned:
        return 1.0
    return min(1.0, len(row.contributors) / assigned)


def _await_step(run: LiveRun, round_: int, fragment: int) -> None:
    """Wait while the coordinator steps to the state `round_`. Holds the lock, but lets it go while it waits."""
    if not run.stepped.wait_for(lambda: run.outer[fragment][0] >= round_, timeout=STEP_WAIT_S):
        raise Problem("not-ready", f"the coordinator is still stepping fragment {fragment}", retry_after_s=1)


def _check_base(run: LiveRun, round_: int, fragment: int, header: ContributionHeader) -> None:
    """It was computed against the run's outer state. Holds the lock."""
    base = run.outer[fragment][1]
    if header.base != base:
        diverging.note(run, header.worker, round_, fragment)
        raise Problem(
            "stale-base",
            f"computed against the state {header.base.hex()} of fragment {fragment}; state {round_} is {base.hex()}",
            round=round_,
        )


def _keep(run: LiveRun, header: ContributionHeader, digest: bytes, size: int) -> None:
    """The row, together with the consumption of the units. Holds the lock."""
    assert run.open is not None
    with run.world.database.write() as session:
        _count(run, session, header, size)
        session.add(
            ContributionRow(
                run_id=run.id,
                round=header.round,
                fragment=header.fragment,
                worker=header.worker,
                digest=digest,
                size=size,
                tokens=header.tokens,
                inner_steps=header.inner_steps,
                loss=header.loss,
                norm=header.norm,
                accepted_at=run.world.now(),
            )
        )
    run.open.fragments[header.fragment].contributed[header.worker] = Contributed(header.tokens, digest)


def _count(run: LiveRun, session: Session, header: ContributionHeader, size: int) -> None:
    """Consume the units, and add up what the run and its worker have brought."""
    units = consume_units(session, run.id, header.worker, header.round, header.units)
    row, worker = run.row(session), worker_row(run, session, header.worker)
    row.tokens += units * run.spec.unit_tokens
    row.upload_bytes += size
    worker.upload_bytes += size
    assert run.open is not None
    if not any(header.worker in each.contributed for each in run.open.fragments):  # they tell of the same units
        worker.contributions += 1
        worker.tokens += sum(stop - start for start, stop in header.units) * run.spec.unit_tokens
