"""Accepting a contribution: check it, make it durable, and only then acknowledge it.

Acknowledged means: it will be in the delta. The file is durable before its row is committed, and the row is committed
before the answer goes out; a refused upload leaves neither. Files become durable side by side; rows that wait for the
lock at the same time are committed together.
"""

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import bindparam, func, insert, select, update

from coordinator.runs import diverging
from coordinator.runs.live_run import Arrival, Change, Contributed, LiveRun, OpenRound
from coordinator.runs.opening import standing
from coordinator.runs.units import consume_units, count_by_round
from coordinator.store.files import Body, PayloadFile, make_durable
from coordinator.store.tables import AssignmentRow, ContributionRow, FragmentRow, LateContributionRow, RunRow, WorkerRow
from protocol.errors import Problem, WireError
from protocol.fragments import Layout
from protocol.messages import ContributionReply, FragmentState
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader

STEP_WAIT_S = 30.0

# Statements, not objects of the session: a run's row has the whole layout in it, and most of a round is these.
_INSERT = insert(ContributionRow)
_COUNT_RUN = (
    update(RunRow)
    .where(RunRow.id == bindparam("of_run"))
    .values(tokens=RunRow.tokens + bindparam("more_tokens"), upload_bytes=RunRow.upload_bytes + bindparam("more_bytes"))
)
_COUNT_WORKER = (
    update(WorkerRow)
    .where(WorkerRow.run_id == bindparam("of_run"), WorkerRow.name == bindparam("of_worker"))
    .values(
        contributions=WorkerRow.contributions + bindparam("more_contributions"),
        tokens=WorkerRow.tokens + bindparam("more_tokens"),
        upload_bytes=WorkerRow.upload_bytes + bindparam("more_bytes"),
    )
)


def accept(run: LiveRun, layout: Layout, worker: str, round_: int, fragment: int, body: Body) -> ContributionReply:
    """Accept the contribution, or raise Problem or WireError. The caller deletes the body's file."""
    with body.payload() as payload:
        header = payload.header
        if not isinstance(header, ContributionHeader):
            raise Problem("invalid-payload", f"the payload is a {header.kind}, expected a contribution")
        _check_header(run, layout, worker, round_, fragment, header)
        payload.check()
    try:
        created = _accept(run, header, body)
    except Problem as problem:
        if problem.slug == "round-closed":
            _note_late(run, worker, round_, fragment)
        raise
    return ContributionReply(round=round_, fragment=fragment, digest=body.digest.hex(), created=created)


def _accept(run: LiveRun, header: ContributionHeader, body: Body) -> bool:
    """Make it durable and commit it, unless that was done; whether it is new."""
    with run.lock:  # refuse before it costs an fsync
        if not _is_new(run, header, body.digest):
            return False
        _await_step(run, header.round, header.fragment)
        if not _is_new(run, header, body.digest):  # others had the lock meanwhile
            return False
        _check_base(run, header)
        _check_weight(run, header)
    file = run.files.contribution(header.round, header.fragment, header.worker, body.digest)
    make_durable(body.path, file)  # without the lock, for the disk takes its time
    arrival = Arrival(header, file, body.digest, body.size, body.content)
    run.arrivals.append(arrival)
    with run.lock:
        if not arrival.looked_at:
            _commit_arrivals(run)
    if arrival.error is not None:
        raise arrival.error
    return arrival.created


def _commit_arrivals(run: LiveRun) -> None:
    """Commit all that is durable, with one transaction and so one fsync: whoever gets the lock does it for everybody
    who waits for it. One that is refused does not touch the others. Under the run's lock."""
    arrivals: list[Arrival] = []
    while run.arrivals:
        arrivals.append(run.arrivals.popleft())
    try:
        due = [arrival for arrival in arrivals if _is_due(run, arrival)]
        if due and run.open is not None:
            with run.change() as change:
                _accept_all(change, run.open, due)
    except BaseException as error:
        for arrival in arrivals:
            if not arrival.created:
                arrival.error = arrival.error or error
        raise
    finally:
        for arrival in arrivals:
            _tidy(run, arrival)
            arrival.looked_at = True


def _accept_all(change: Change, opening: OpenRound, due: Sequence[Arrival]) -> None:
    accepted: list[Arrival] = []
    consumed: dict[str, list[list[int]]] = {}
    units: list[int] = []
    for arrival in due:
        try:
            if _is_first(arrival, accepted):
                units.append(_consume(change, opening, arrival.header, consumed))
                accepted.append(arrival)
        except Problem as problem:
            arrival.error = problem
    if accepted:
        _insert(change, accepted)
        _count(change, opening, accepted, units)

    def apply() -> None:
        opening.consumed |= consumed
        for arrival in accepted:
            header = arrival.header
            fragment = opening.fragments[header.fragment]
            fragment.contributed[header.worker] = Contributed(header.tokens, arrival.digest)
            if arrival.content is not None:
                fragment.contents[header.worker] = arrival.content
            arrival.created = True

    change.then(apply)


def _is_first(arrival: Arrival, accepted: Sequence[Arrival]) -> bool:
    """Return True if this very transaction has not accepted it already; Problem if it has another in its place."""
    header = arrival.header
    for each in accepted:
        if (each.header.worker, each.header.fragment) == (header.worker, header.fragment):
            if each.digest != arrival.digest:
                raise _conflict(header.worker, header.round, header.fragment, each.digest, each.header.units)
            return False
    return True


def _is_due(run: LiveRun, arrival: Arrival) -> bool:
    """Return True if it is to be committed: much may have happened since it was looked at first."""
    try:
        if not _is_new(run, arrival.header, arrival.digest):
            return False
        if not arrival.file.is_file():
            raise Problem("not-ready", "the same contribution came twice at once; send it again", retry_after_s=1)
    except Problem as problem:
        arrival.error = problem
        return False
    return True


def _tidy(run: LiveRun, arrival: Arrival) -> None:
    """Delete the file of what was refused. Two uploads of one contribution share a file: what is committed stays."""
    header = arrival.header
    if arrival.error is not None and _known(run, header.worker, header.round, header.fragment) != arrival.digest:
        arrival.file.unlink(missing_ok=True)


def _check_header(
    run: LiveRun, layout: Layout, worker: str, round_: int, fragment: int, header: ContributionHeader
) -> None:
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
    if header.tokens % run.spec.unit_tokens:
        raise Problem(
            "invalid-payload", f"header field tokens is {header.tokens}, no multiple of {run.spec.unit_tokens} per unit"
        )


def _check_weight(run: LiveRun, header: ContributionHeader) -> None:
    """Refuse it unless it weighs one round's work: that of its own round or, where all of it is carried, at most that
    of the last carried round. Under the run's lock.

    Where fragments are sent in the middle of a round, each was trained on a whole round's units since it was sent last,
    of this round and the one before, though the contribution names only those that no other one has named.
    """
    weight, units = header.tokens // run.spec.unit_tokens, sum(stop - start for start, stop in header.units)
    by_round, inner_steps = _named(run, header)
    if by_round.total() < units:
        raise Problem(
            "units-not-held", f"of the work units {header.units[:3]}… {header.worker} holds only {by_round.total()}"
        )
    own, last_carried = by_round.pop(header.round, 0), by_round[max(by_round, default=0)]
    if run.spec.sync.streams:
        least, most = 1, max(own + last_carried, inner_steps)
    elif own:
        least, most = own, own
    else:
        least, most = 1, last_carried
    if not least <= weight <= most:
        raise Problem(
            "invalid-payload",
            f"header field tokens is {header.tokens}: {weight} units; the contribution names {units}, {own} of them of "
            f"its own round, and its weight is {least} to {most}",
        )


def _named(run: LiveRun, header: ContributionHeader) -> tuple[Counter[int], int]:
    """How many units the contribution names of each round that they were assigned for, those alone that the worker may
    name; and the inner steps that its own round was assigned with. Under the run's lock."""
    given = None if run.open is None else run.open.given.get(header.worker)
    if given is not None and [list(each) for each in given.units] == header.units:  # as most do; no need to ask
        return Counter({header.round: sum(stop - start for start, stop in header.units)}), given.inner_steps
    with run.world.database.read() as session:
        row = session.get(AssignmentRow, (run.id, header.round, header.worker))
        by_round = count_by_round(session, run.id, header.worker, header.round, header.units)
    return by_round, 0 if row is None else row.inner_steps


def _is_new(run: LiveRun, header: ContributionHeader, digest: bytes) -> bool:
    """Return True if the contribution would be new; Problem where the round does not take it. Under the run's lock."""
    worker, round_, fragment = header.worker, header.round, header.fragment
    known = _known(run, worker, round_, fragment)
    if known is not None:
        if known != digest:
            raise _conflict(worker, round_, fragment, known, _units_of(run, worker, round_, fragment, known))
        return False
    closed = round_ < run.round
    if run.open is not None and round_ == run.round:
        closed = run.open.fragments[fragment].state is not FragmentState.COLLECTING
    if closed:
        raise Problem(
            "round-closed",
            f"round {round_} closed for fragment {fragment} without {worker}; carry the work into round {run.round}",
            round=run.round,
            share=_share(run, round_, fragment),
        )
    if run.ended:
        raise Problem("run-ended", f"the run {run.name} is {run.state}")
    if run.open is None or round_ != run.round:
        raise Problem("round-not-open", f"round {round_} is not open: {standing(run)}")
    return True


def _conflict(worker: str, round_: int, fragment: int, known: bytes, units: list[list[int]] | None) -> Problem:
    """Say which units the contribution that stands was trained on: a worker that has lost its state since may have
    trained on others."""
    detail = f"{worker} has already contributed to round {round_}, fragment {fragment}: digest {known.hex()}"
    return Problem("contribution-conflict", detail, units=units)


def _units_of(run: LiveRun, worker: str, round_: int, fragment: int, digest: bytes) -> list[list[int]] | None:
    """The units of an accepted contribution, from its file; None where that was deleted or spoilt since."""
    try:
        with PayloadFile(run.files.contribution(round_, fragment, worker, digest)) as payload:
            return payload.header.units if isinstance(payload.header, ContributionHeader) else None
    except (OSError, WireError):
        return None


def _known(run: LiveRun, worker: str, round_: int, fragment: int) -> bytes | None:
    """The digest of the contribution that was accepted. Under the run's lock."""
    if run.open is not None and round_ == run.round:
        contributed = run.open.fragments[fragment].contributed.get(worker)
        return None if contributed is None else contributed.digest
    with run.world.database.read() as session:
        row = session.get(ContributionRow, (run.id, round_, fragment, worker))
    return None if row is None else row.digest


def _note_late(run: LiveRun, worker: str, round_: int, fragment: int) -> None:
    """Let the round's record say who was late, and by how much."""
    key = (run.id, round_, fragment, worker)
    with run.world.database.read() as session:
        row = session.get(FragmentRow, key[:3])
        took_part = session.get(AssignmentRow, (run.id, round_, worker)) is not None
        noted = session.get(LateContributionRow, key) is not None
    if row is None or row.closed_at is None or not took_part or noted:
        return
    late_s = max(0.0, run.world.now() - row.closed_at)
    with run.change() as change:
        late = LateContributionRow(run_id=run.id, round=round_, fragment=fragment, worker=worker, late_s=late_s)
        change.session.add(late)


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
    """Wait while the coordinator steps to the state `round_`. Under the run's lock, which is free while it waits."""
    if not run.stepped.wait_for(lambda: run.outer[fragment][0] >= round_, timeout=STEP_WAIT_S):
        raise Problem("not-ready", f"the coordinator is still stepping fragment {fragment}", retry_after_s=1)


def _check_base(run: LiveRun, header: ContributionHeader) -> None:
    """It was computed against the run's outer state. Under the run's lock."""
    base = run.outer[header.fragment][1]
    if header.base != base:
        diverging.note(run, header.worker, header.round, header.fragment)
        raise Problem(
            "stale-base",
            f"computed against the state {header.base.hex()} of fragment {header.fragment}; state {header.round} is "
            f"{base.hex()}",
            round=header.round,
        )


def _consume(
    change: Change, opening: OpenRound, header: ContributionHeader, consumed: dict[str, list[list[int]]]
) -> int:
    """Consume the units; how many of them for the first time. The fragments of one contribution name the same ones.

    `consumed`: as `OpenRound.consumed`, by the same transaction.
    """
    if header.units in (opening.consumed.get(header.worker), consumed.get(header.worker)):
        return 0
    with change.session.begin_nested():
        count = consume_units(change.session, change.run.id, header.worker, header.round, header.units)
    consumed[header.worker] = header.units
    return count


def _insert(change: Change, accepted: Sequence[Arrival]) -> None:
    """The rows of the contributions, in the transaction that consumed their units."""
    run = change.run
    rows = [
        {
            "run_id": run.id,
            "round": arrival.header.round,
            "fragment": arrival.header.fragment,
            "worker": arrival.header.worker,
            "digest": arrival.digest,
            "size": arrival.size,
            "tokens": arrival.header.tokens,
            "inner_steps": arrival.header.inner_steps,
            "loss": arrival.header.loss,
            "norm": arrival.header.norm,
            "accepted_at": run.world.now(),
        }
        for arrival in accepted
    ]
    change.session.connection().execute(_INSERT, rows)


def _count(change: Change, opening: OpenRound, accepted: Sequence[Arrival], units: Sequence[int]) -> None:
    """Add up what the run and its workers have brought. `units`: how many each has consumed."""
    run = change.run
    known = {worker for fragment in opening.fragments for worker in fragment.contributed}
    counts = []
    for arrival, consumed in zip(accepted, units, strict=True):
        worker = arrival.header.worker
        counts.append(
            {
                "of_run": run.id,
                "of_worker": worker,
                "more_contributions": int(worker not in known),  # one contribution, whatever its parts
                "more_tokens": consumed * run.spec.unit_tokens,
                "more_bytes": arrival.size,
            }
        )
        known.add(worker)
    connection = change.session.connection()
    connection.execute(_COUNT_WORKER, counts)
    connection.execute(
        _COUNT_RUN,
        {
            "of_run": run.id,
            "more_tokens": sum(units) * run.spec.unit_tokens,
            "more_bytes": sum(arrival.size for arrival in accepted),
        },
    )
