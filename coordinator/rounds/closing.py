"""The closing of a fragment: from then on its contributors are fixed. `rounds.py` decides when."""

from collections.abc import Set

from sqlalchemy import select

from coordinator.run.decide import Close, advance, names_of
from coordinator.run.live_run import Change, Settling
from coordinator.run.open_round import OpenRound
from coordinator.store.tables import EventRow, FragmentRow
from coordinator.trust.equal_work import tell_equal_work
from coordinator.trust.weights import weights
from outerstep.common.quantities import natural
from protocol.messages import RunState


def close_due(settling: Settling) -> bool:
    """Close the collecting fragments of the open round that are due; return True if there were any."""
    run, opening = settling.run, settling.run.open
    if opening is None or run.state is RunState.STOPPED:
        return False
    now = run.world.clock()
    members, policy = run.members, run.spec.members
    expected, newcomers = members.waited_for(opening.assigned)
    silent = members.silent(now)
    decisions = [
        each.due(expected, newcomers, members.owners, policy, opening.opened_at, now, silent)
        for each in opening.fragments
    ]
    if not any(decisions):
        return False
    with settling.change() as change:
        for index, decision in enumerate(decisions):
            if decision is not None:
                _close(change, opening, index, decision, expected | newcomers)
    return True


def _close(change: Change, opening: OpenRound, index: int, decision: Close, waited_for: Set[str]) -> None:
    """Fix the contributors of fragment `index`, and their weights, durably."""
    run, fragment = change.run, opening.fragments[index]
    tokens = {worker: fragment.contributed[worker].tokens for worker in decision.contributors}
    contributors = weights(tokens, run.spec.sync)
    late = sorted((opening.assigned & run.members.live()) - contributors.keys())
    reason = decision.reason
    if ignored := [worker for worker in late if worker not in waited_for]:
        reason += f"; nobody waited for {names_of(sorted(ignored, key=natural))}"
    row = change.session.get_one(FragmentRow, (run.id, opening.number, index))
    closed = advance(fragment.state, "closed")
    row.state, row.reason, row.contributors = closed, reason, contributors
    row.closed_at = run.world.now()
    if fragment.quorum_at is not None:
        row.quorum_at = row.closed_at - (run.world.clock() - fragment.quorum_at)
    if late and not _is_late_recorded(change, opening.number, late):
        message = f"round {opening.number}, first in fragment {index}: {reason}"
        change.record("late", message, round=opening.number, fragment=index, workers=late)

    if index == 0:  # one tells of all of them
        tell_equal_work(change, opening.number, index)

    def apply() -> None:
        fragment.state, fragment.closes_at, fragment.weights = closed, None, contributors

    change.then(apply)


def _is_late_recorded(change: Change, round_: int, workers: list[str]) -> bool:
    """Return True if an event says already that a fragment of the round closed without exactly these workers."""
    recorded = change.session.scalars(
        select(EventRow.data).where(
            EventRow.run_id == change.run.id,
            EventRow.kind == "late",
            EventRow.data["round"].as_integer() == round_,
        )
    )
    return any(data["workers"] == workers for data in recorded)
