"""The checks of a contribution. Each one rejects it by raising a Problem with the reason."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import func, select

from coordinator.aggregation.tasks import Lateness
from coordinator.rounds.opening import status
from coordinator.run.live_run import LiveRun
from coordinator.run.open_round import OpenRound
from coordinator.run.units import carrying
from coordinator.run.units.ledger import count_by_round
from coordinator.store.blobs import StoreOutage
from coordinator.store.payloads import StoredPayload
from coordinator.store.tables import AssignmentRow, ContributionRow, FragmentRow, LateContributionRow
from protocol.errors import Problem, WireError
from protocol.fragments import Layout
from protocol.messages import FragmentState
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader

STEP_WAIT_S = 30.0
# Problems of a contribution that its worker may repeat for ever.
WRONG = frozenset({"invalid-payload", "payload-too-large", "digest-mismatch", "stale-base", "units-not-held"})
WEIGHED_ROUNDS = 8  # over these rounds, a worker's contributions weigh no more than its assignments


def check_header(
    run: LiveRun, layout: Layout, worker: str, round_: int, fragment: int, header: ContributionHeader
) -> None:
    """Raise Problem unless the header matches the URL of the request, the layout and the run spec."""
    expected = {
        "run": run.name,
        "round": round_,
        "fragment": fragment,
        "worker": worker,
        "codec": run.spec.sync.upload_codec,
        "elements": layout.elements[fragment],
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
    if header.tokens % (unit_tokens := run.unit_tokens(worker)):
        raise Problem(
            "invalid-payload", f"header field tokens is {header.tokens}, no multiple of {unit_tokens} per unit"
        )


def admit(run: LiveRun, header: ContributionHeader, digest: bytes) -> Lateness | None:
    """Return the work of earlier rounds in a contribution that may be accepted; None if it already was. May wait for an
    outer step. Raises Problem if it is rejected."""
    address = header.worker, header.round, header.fragment
    with run.lock:
        if open_for(run, *address, digest) is None:
            return None
        if not run.outer.await_round(header.fragment, header.round, STEP_WAIT_S):
            detail = f"the coordinator is still stepping fragment {header.fragment}"
            raise Problem("not-ready", detail, retry_after_s=1)
        opening = open_for(run, *address, digest)  # other threads had the lock in the meantime
        if opening is None:
            return None
        _check_base(run, opening, header)
        units = _check_weight(run, opening, header)
    return carrying.late_work(run, header)._replace(units=units)


def open_for(run: LiveRun, worker: str, round_: int, fragment: int, digest: bytes) -> OpenRound | None:
    """Return the open round if it expects the worker's contribution; None if the contribution was already accepted.
    Raises Problem if the contribution must be rejected."""
    with run.lock:
        known, opening = accepted_digest(run, worker, round_, fragment), run.open
        if known is not None:
            if known != digest:
                raise conflict(worker, round_, fragment, known, _units_of(run, worker, round_, fragment, known))
            return None
        closed = round_ < run.round
        if opening is not None and round_ == run.round:
            closed = opening.fragments[fragment].state is not FragmentState.COLLECTING
        if closed:
            detail = f"round {round_} closed for fragment {fragment} without {worker}; carry the work into round "
            share = _share(run, round_, fragment)
            raise Problem("round-closed", f"{detail}{run.round}", round=run.round, share=share)
        if run.ended:
            raise Problem("run-ended", f"the run {run.name} is {run.state}")
        if opening is None or round_ != run.round:
            raise Problem("round-not-open", f"round {round_} is not open: {status(run)}")
        return opening


def _check_base(run: LiveRun, opening: OpenRound, header: ContributionHeader) -> None:
    """Raise Problem unless the contribution was computed against the run's outer state. Count a divergence once per
    worker and round, however many fragments differ."""
    worker, round_, fragment = header.worker, header.round, header.fragment
    base = run.outer.states[fragment].digest
    if header.base == base:
        return
    if worker not in opening.diverged | run.members.stale:
        with run.change() as change:
            change.row.divergences += 1
            change.worker_row(worker).divergences += 1
            message = f"{worker} holds another state {round_} of fragment {fragment} than the run; it must recover"
            change.record("diverged", message, worker=worker, round=round_, fragment=fragment)
            change.after_commit(partial(opening.diverged.add, worker))
    detail = f"computed against the state {header.base.hex()} of fragment {fragment}; state {round_} is {base.hex()}"
    raise Problem("stale-base", detail, round=round_)


def _check_weight(run: LiveRun, opening: OpenRound, header: ContributionHeader) -> int:
    """Raise Problem unless the coordinator's own record supports the weight, in units. Return the units of its work, at
    most the worker's largest assignment, if it weighs less because its worker is behind and none is late; otherwise 0.

    The weight must be the number of named units of the contribution's own round. If all its work is carried, the weight
    is at most the number of units named of the last carried round, and at most the worker's largest assignment.

    If fragments are sent in the middle of a round, each one was trained on a whole round's units since it was last
    sent, some from this round and some from the one before. But the contribution names only units that no earlier one
    has named.
    """
    weight, units = header.tokens // run.unit_tokens(header.worker), sum(stop - start for start, stop in header.units)
    by_round, inner_steps = _units_by_round(run, opening, header)
    if by_round.total() < units:
        raise Problem(
            "units-not-held", f"of the work units {header.units[:3]}… {header.worker} holds only {by_round.total()}"
        )
    own, last_carried = by_round.pop(header.round, 0), by_round[max(by_round, default=0)]
    sync, of_old_state = run.spec.sync, 0
    if sync.streams:
        unused, largest = _unused_weight(run, header)
        least, most = 1, min(max(own + last_carried, inner_steps), unused)
        # Otherwise a fragment has other units than the contribution names, or the missed means are subtracted.
        if sync.wait == "never" and weight < units and not header.carried:
            of_old_state = min(units, largest)
    elif own:
        least, most = own, own
    else:
        least, most = 1, min(last_carried, _unused_weight(run, header)[0])
    if not least <= weight <= most:
        raise Problem(
            "invalid-payload",
            f"header field tokens is {header.tokens}: {weight} units; the contribution names {units}, {own} of them of "
            f"its own round, and its weight is {least} to {most}",
        )
    return of_old_state


def _unused_weight(run: LiveRun, header: ContributionHeader) -> tuple[int, int]:
    """Return the largest weight that a contribution may have, and its worker's largest assignment, in units.

    It is what the worker was assigned in the last WEIGHED_ROUNDS rounds, minus what its contributions to the fragment
    have weighed in them, plus one more assignment: a fragment may contain work from before these rounds, since the
    worker's last contribution to it there. If fragments are not sent during training, it is at most one assignment.
    """
    worker, rounds = header.worker, range(max(header.round - WEIGHED_ROUNDS + 1, 0), header.round + 1)
    with run.context.database.read() as session:
        last = carrying.last_contribution(session, run, worker, header.fragment, range(rounds.start))
        since = range(0 if last is None else last, rounds.stop)
        assigned = carrying.assigned_steps(session, run, worker, since)
        used = carrying.weighed_tokens(session, run, worker, header.fragment, rounds[:-1])
    largest = max(assigned.values(), default=0)
    within = sum(steps for round_, steps in assigned.items() if round_ in rounds)
    unused = within + largest - used // run.unit_tokens(worker)
    return max(unused if run.spec.sync.streams else min(unused, largest), 0), largest


def _units_by_round(run: LiveRun, opening: OpenRound, header: ContributionHeader) -> tuple[Counter[int], int]:
    """Return (units, inner steps). The units that the contribution names and its worker holds are counted by the round
    of their assignment. The inner steps are those of the worker's assignment in this round."""
    assignment = opening.assignments.get(header.worker)
    # Most contributions name exactly the assigned units, and need no query.
    if assignment is not None and [list(each) for each in assignment.units] == header.units:
        return Counter({header.round: sum(stop - start for start, stop in header.units)}), assignment.inner_steps
    with run.context.database.read() as session:
        row = session.get(AssignmentRow, (run.id, header.round, header.worker))
        by_round = count_by_round(session, run.id, header.worker, header.round, header.units)
    return by_round, 0 if row is None else row.inner_steps


def conflict(worker: str, round_: int, fragment: int, known: bytes, units: list[list[int]] | None) -> Problem:
    """Return the Problem for a contribution that differs from the accepted one, whose digest is `known`.

    `units`: the units of the accepted one. A worker that has lost its state in the meantime may have trained on others.
    """
    detail = f"{worker} has already contributed to round {round_}, fragment {fragment}: digest {known.hex()}"
    return Problem("contribution-conflict", detail, units=units)


def _units_of(run: LiveRun, worker: str, round_: int, fragment: int, digest: bytes) -> list[list[int]] | None:
    """Return the units of an accepted contribution, read from its blob; None if the blob is deleted or corrupt."""
    try:
        with StoredPayload(run.blobs.open(run.names.contribution(round_, fragment, worker, digest))) as payload:
            return payload.header.units if isinstance(payload.header, ContributionHeader) else None
    except StoreOutage:
        raise
    except (OSError, WireError):
        return None


def accepted_digest(run: LiveRun, worker: str, round_: int, fragment: int) -> bytes | None:
    """Return the digest of the accepted contribution; None if there is none."""
    with run.lock:
        if run.open is not None and round_ == run.round:
            contributed = run.open.fragments[fragment].contributed.get(worker)
            return None if contributed is None else contributed.digest
    with run.context.database.read() as session:
        row = session.get(ContributionRow, (run.id, round_, fragment, worker))
    return None if row is None else row.digest


@contextmanager
def noting_rejected(run: LiveRun, worker: str, round_: int, fragment: int) -> Iterator[None]:
    """Record that the worker's contribution was late, or wrong, if the block rejects it for that."""
    try:
        yield
    except (Problem, WireError) as error:
        slug = error.slug if isinstance(error, Problem) else "invalid-payload"
        if slug == "round-closed":
            record_late(run, worker, round_, fragment)
        elif slug in WRONG:
            with run.lock:
                if run.open is not None and run.round == round_:
                    run.open.refused.add(worker)
        raise


def record_late(run: LiveRun, worker: str, round_: int, fragment: int) -> None:
    """Record that the worker's contribution was late, and by how many seconds. Do nothing if that is already recorded,
    or if the worker had no assignment."""
    key = (run.id, round_, fragment, worker)
    with run.context.database.read() as session:
        row = session.get(FragmentRow, key[:3])
        took_part = session.get(AssignmentRow, (run.id, round_, worker)) is not None
        noted = session.get(LateContributionRow, key) is not None
    if row is None or row.closed_at is None or not took_part or noted:
        return
    late_s = max(0.0, run.context.now() - row.closed_at)
    with run.change() as change:
        late = LateContributionRow(run_id=run.id, round=round_, fragment=fragment, worker=worker, late_s=late_s)
        change.session.add(late)
        change.after_commit(run.counters.count_late)


def _share(run: LiveRun, round_: int, fragment: int) -> float:
    """Return the share of a past round's workers that contributed to the fragment; 1 if the rows are deleted."""
    with run.context.database.read() as session:
        row = session.get(FragmentRow, (run.id, round_, fragment))
        assigned = session.scalar(
            select(func.count()).where(AssignmentRow.run_id == run.id, AssignmentRow.round == round_)
        )
    if row is None or not row.contributors or not assigned:
        return 1.0
    return min(1.0, len(row.contributors) / assigned)
