"""The status of a delta: its digest once it is published, and before that what it waits for, in words.

`member` is the worker that asks; None for somebody who only reads. `early`: its contribution is still on its way.
"""

from coordinator.rounds.opening import status, waits_for
from coordinator.run.live_run import LiveRun
from coordinator.store.tables import FragmentRow
from protocol.errors import Problem
from protocol.messages import FragmentState


def from_memory(
    run: LiveRun, number: int, fragment: int, member: str | None, early: bool
) -> tuple[bool, bytes | str] | None:
    """Return what `under_lock` would, from memory alone; None if memory does not tell. It does for a delta that was
    just published, and for a member that has contributed to one of the open round, or is about to."""
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


def under_lock(run: LiveRun, number: int, fragment: int, member: str | None, early: bool) -> tuple[bool, bytes | str]:
    """Return (True, the delta's digest), or (False, what it waits for) before it is published.

    A member asks for the delta of its own contribution, so it is told if the coordinator does not have that: the disk
    has lost it, or the database was restored from a backup. Unless it asks early.
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
