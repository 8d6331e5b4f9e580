"""Accepting a contribution: check it, make it durable, and only then acknowledge it.

Every acknowledged contribution will be aggregated. The blob is durable before its row is committed, and the row is
committed before the response is sent; a rejected upload leaves neither. Blobs become durable in parallel; rows that
wait for the lock at the same time are committed together.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import bindparam, insert, update

from coordinator.aggregation.fragment import sketch_key
from coordinator.aggregation.measuring import Measure, measure_payload
from coordinator.aggregation.tasks import NOT_LATE
from coordinator.run.live_run import Arrival, Change, LiveRun
from coordinator.run.open_round import AcceptedContribution, OpenRound
from coordinator.run.units.ledger import consume_units
from coordinator.store.payloads import Body, has_digest
from coordinator.store.tables import ContributionRow, RunRow, WorkerRow
from coordinator.sync import admission
from coordinator.trust.verdicts import keep_in_memory
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import ContributionReply
from protocol.wire import ContributionHeader

# Core statements instead of ORM objects: accepting is most of a round's work, and loading a run's row would load its
# whole layout.
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
        direct=bindparam("is_direct"),
    )
)


def accept_part(run: LiveRun, worker: str, round_: int, fragment: int, digest: bytes) -> ContributionReply | None:
    """Return None if the rest of a contribution with this digest may be sent, or the final reply if it was accepted
    before. Raises Problem if it would be rejected, so that the worker does not send the rest."""
    with admission.noting_rejected(run, worker, round_, fragment):
        if admission.open_for(run, worker, round_, fragment, digest) is not None:
            return None
    return ContributionReply(round=round_, fragment=fragment, digest=digest.hex(), created=False)


def accept(run: LiveRun, layout: Layout, worker: str, round_: int, fragment: int, body: Body) -> ContributionReply:
    """Accept the contribution in `body`. Raises Problem or WireError."""
    with admission.noting_rejected(run, worker, round_, fragment):
        with body.payload() as payload:
            header = payload.header
            if not isinstance(header, ContributionHeader):
                raise Problem("invalid-payload", f"the payload is a {header.kind}, expected a contribution")
            admission.check_header(run, layout, worker, round_, fragment, header)
            key = sketch_key(run.context.secret, run.name, round_, fragment)
            measured = keep_in_memory(run, measure_payload(payload, key))  # checks the payload, too
        created = _accept(run, header, body, measured)
    return ContributionReply(round=round_, fragment=fragment, digest=body.digest.hex(), created=created)


def _accept(run: LiveRun, header: ContributionHeader, body: Body, measured: Measure | None) -> bool:
    """Make the contribution durable and commit it. Return False if it was accepted before."""
    lateness = admission.admit(run, header, body.digest)  # checked before the fsync, to save it
    if lateness is None:
        return False
    name = run.names.contribution(header.round, header.fragment, header.worker, body.digest)
    arrival = Arrival(header, name, body.digest, body.size, body.content, measured, lateness)
    return commit_blob(run, arrival, lambda: _put(run, name, body))


def _put(run: LiveRun, name: str, body: Body) -> None:
    """Make the blob durable. Replace an earlier one that its worker has uploaded to the store itself with other bytes
    than it had announced."""
    if run.blobs.put(name, body.source) or run.blobs.direct is None or has_digest(run.blobs, name, body.digest):
        return
    run.blobs.delete(name)
    if not run.blobs.put(name, body.source):
        raise Problem("not-ready", "another upload to the store has the same name", retry_after_s=1)


def commit_blob(run: LiveRun, arrival: Arrival, write: Callable[[], object]) -> bool:
    """Commit a contribution once `write` has made its blob durable. Return False if it was accepted before. Raises what
    `write` raises, and the Problem if it is rejected; then the blob is deleted."""
    with run.uploads.begin(arrival.name, lambda: _is_accepted(run, arrival.header, arrival.digest)):
        write()  # without the lock: the store is slow
        run.arrivals.append(arrival)
        _commit(run, arrival)
    if arrival.error is not None:
        raise arrival.error
    return arrival.created


def _is_accepted(run: LiveRun, header: ContributionHeader, digest: bytes) -> bool:
    """Return True if a contribution with these bytes was accepted: then both share the blob."""
    return admission.accepted_digest(run, header.worker, header.round, header.fragment) == digest


def _commit(run: LiveRun, own: Arrival) -> None:
    """Commit the arrival, together with all others that wait for the lock: one transaction and so one fsync. Do nothing
    if another thread has already committed it with its own. Rejecting one does not affect the others."""
    with run.lock:
        arrivals: list[Arrival] = []
        while run.arrivals and not own.processed:
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
                arrival.processed = True


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

    now = change.run.context.clock()

    def apply() -> None:
        opening.consumed |= consumed
        for arrival in accepted:
            header = arrival.header
            fragment = opening.fragments[header.fragment]
            fragment.contributed[header.worker] = AcceptedContribution(
                header.tokens, arrival.digest, arrival.measured, now, arrival.sha256, arrival.lateness
            )
            if arrival.content is not None:
                fragment.contents[header.worker] = arrival.content
            arrival.created = True

    change.after_commit(apply)


def _is_first(arrival: Arrival, accepted: Sequence[Arrival]) -> bool:
    """Return True unless this transaction has already accepted the same contribution. Raises Problem if it has accepted
    a different one from that worker."""
    header = arrival.header
    for each in accepted:
        if (each.header.worker, each.header.fragment) == (header.worker, header.fragment):
            if each.digest != arrival.digest:
                raise admission.conflict(header.worker, header.round, header.fragment, each.digest, each.header.units)
            return False
    return True


def _is_due(run: LiveRun, arrival: Arrival) -> bool:
    """Return True if the arrival must be committed. This is checked again, because the round may have closed
    meanwhile."""
    try:
        header = arrival.header
        if admission.open_for(run, header.worker, header.round, header.fragment, arrival.digest) is None:
            return False
        run.uploads.check_present(arrival.name)
    except Problem as problem:
        arrival.error = problem
        return False
    return True


def _consume(
    change: Change, opening: OpenRound, header: ContributionHeader, consumed: dict[str, list[list[int]]]
) -> int:
    """Consume the contribution's units. Return how many were not consumed before: all fragments of a worker name the
    same units.

    `consumed`: like `OpenRound.consumed`, for this transaction.
    """
    if header.units in (opening.consumed.get(header.worker), consumed.get(header.worker)):
        return 0
    with change.session.begin_nested():
        count = consume_units(change.session, change.run.id, header.worker, header.round, header.units)
    consumed[header.worker] = header.units
    return count


def _insert(change: Change, accepted: Sequence[Arrival]) -> None:
    """Insert the rows of the contributions in the transaction that consumes their units."""
    run = change.run
    rows = [
        {
            "run_id": run.id,
            "round": arrival.header.round,
            "fragment": arrival.header.fragment,
            "worker": arrival.header.worker,
            "digest": arrival.digest,
            "sha256": arrival.sha256,
            "lateness": None if arrival.lateness == NOT_LATE else list(arrival.lateness),
            "size": arrival.size,
            "tokens": arrival.header.tokens,
            "inner_steps": arrival.header.inner_steps,
            "loss": arrival.header.loss,
            "norm": arrival.header.norm,
            "accepted_at": run.context.now(),
        }
        for arrival in accepted
    ]
    change.session.connection().execute(_INSERT, rows)


def _count(change: Change, opening: OpenRound, accepted: Sequence[Arrival], units: Sequence[int]) -> None:
    """Add the contributions to the counters of the run and its workers. `units`: how many units each one has newly
    consumed."""
    run = change.run
    known = {worker for fragment in opening.fragments for worker in fragment.contributed}
    counts = list[dict[str, Any]]()
    for arrival, consumed in zip(accepted, units, strict=True):
        worker = arrival.header.worker
        counts.append(
            {
                "of_run": run.id,
                "of_worker": worker,
                "more_contributions": int(worker not in known),  # counts once per round, not per fragment
                "more_tokens": consumed * run.unit_tokens(worker),
                "more_bytes": arrival.size,
                "is_direct": arrival.sha256 is not None,
            }
        )
        known.add(worker)
    connection = change.session.connection()
    connection.execute(_COUNT_WORKER, counts)
    connection.execute(
        _COUNT_RUN,
        {
            "of_run": run.id,
            "more_tokens": sum(each["more_tokens"] for each in counts),
            "more_bytes": sum(arrival.size for arrival in accepted),
        },
    )
