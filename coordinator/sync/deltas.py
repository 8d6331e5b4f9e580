"""Deltas: rebuilt byte for byte if the stored one is corrupt, and reported to workers that wait for them."""

from collections.abc import Collection

from sqlalchemy import select

from coordinator.aggregation.fragment import ResidualLost, blob_of, lost_contributions, make_delta
from coordinator.aggregation.tasks import Collected, Given
from coordinator.rounds.opening import status, waits_for
from coordinator.run.live_run import LiveRun
from coordinator.store.payloads import StoredPayload, fault_in
from coordinator.store.tables import ContributionRow, FragmentRow
from coordinator.sync import retention
from protocol.digest import digest
from protocol.errors import Problem
from protocol.messages import FragmentState
from protocol.wire import ContributionHeader


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
    with run.lock:
        if not retention.keeps_delta(run, round_) or (round_, fragment) in run.outer.lost_deltas:
            return False  # deleted by retention in the meantime, or its loss is already recorded
    rebuilt = _rebuild(run, row)
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


def previous_residual(run: LiveRun, round_: int, fragment: int) -> bytes | None:
    """Return the digest of the residual of the delta before that of `round_`; None if there is none."""
    with run.context.database.read() as session:
        before = session.get(FragmentRow, (run.id, round_ - 1, fragment))
    return None if before is None else before.residual_digest


def collected_again(
    run: LiveRun, row: FragmentRow, without: Collection[str] = ()
) -> tuple[Collected, dict[str, float]] | None:
    """Return what was collected for a published delta, and the factors of its verdicts, leaving out the workers
    `without`. Return None if contributions are lost, or if none is left."""
    assert run.model is not None, "a round has a layout"
    weights = row.contributors or {}
    factors = {worker: row.verdicts[worker]["factor"] for worker in weights if worker not in without}
    factors = {worker: factor for worker, factor in factors.items() if factor > 0}
    with run.context.database.read() as session:
        query = select(ContributionRow).where(ContributionRow.run_id == run.id, ContributionRow.round == row.round)
        rows = session.scalars(query.where(ContributionRow.fragment == row.fragment)).all()
    collected = Collected(
        run=run.name,
        round=row.round,
        fragment=row.fragment,
        elements=run.model.layout.elements[row.fragment],
        base=b"",
        sync=run.spec.sync,
        contributions={
            each.worker: Given(digest=each.digest, sha256=None, tokens=weights[each.worker])
            for each in rows
            if each.worker in factors
        },
    )
    given = collected.contributions
    if not given or given.keys() != factors.keys() or lost_contributions(collected, run.blobs):
        return None
    with StoredPayload(run.blobs.open(blob_of(collected, min(given)))) as payload:
        assert isinstance(payload.header, ContributionHeader)
        base = payload.header.base  # the run's state of that round: contributions with another base are rejected
    known = {"base": base, "residual": previous_residual(run, row.round, row.fragment)}
    return collected.model_copy(update=known), factors


def _rebuild(run: LiveRun, row: FragmentRow) -> bool:
    expected = row.delta_digest
    assert expected is not None
    if (found := collected_again(run, row)) is None:
        return False
    collected, factors = found
    try:
        delta, _ = make_delta(collected, run.blobs, factors)
    except ResidualLost:
        return False
    if digest(delta) != expected:
        return False
    name = run.names.delta(row.round, row.fragment, expected)
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
            if member is not None and (number > run.round or member in run.members.stale):
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
