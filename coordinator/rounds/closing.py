"""Closing a fragment: its contributors and their weights are fixed, durably. `run/decide.py` decides when."""

from collections.abc import Sequence, Set

from sqlalchemy import select

from coordinator.run.decide import Close, advance, names_of
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.members import MISSED
from coordinator.run.open_round import OpenRound
from coordinator.store.tables import FragmentRow
from coordinator.trust.equal_work import report_equal_work
from coordinator.trust.verdicts import weights
from outerstep.common.quantities import natural
from protocol.messages import RunState


def close_due(run: LiveRun) -> bool:
    """Close the fragments of the open round that are due. Return True if there were any."""
    opening = run.open
    if opening is None or run.state is RunState.STOPPED or run.redo is not None:
        return False
    now = run.context.clock()
    members, policy = run.members, run.spec.members
    expected, newcomers = members.waited_for(opening.assigned)
    silent, stalled = members.silent(now), members.stalled(now)
    refused = opening.refused | members.quarantined(run.round)
    decisions = [
        each.due(expected, newcomers, members.owners, policy, opening, now, silent, refused, stalled)
        for each in opening.fragments
    ]
    if not any(decisions):
        return False
    with run.change() as change:
        for index, decision in enumerate(decisions):
            if decision is not None:
                _close(change, opening, index, decision, expected | newcomers)
    return True


def _close(change: Change, opening: OpenRound, index: int, decision: Close, waited_for: Set[str]) -> None:
    """Fix the contributors of fragment `index` and their weights. `waited_for`: the workers that the round waited
    for."""
    run, fragment = change.run, opening.fragments[index]
    tokens = {worker: fragment.contributed[worker].tokens for worker in decision.contributors}
    contributors = weights(tokens, run.spec.sync)
    late = sorted((opening.assigned & run.members.live()) - contributors.keys())
    reason = decision.reason
    if ignored := [worker for worker in late if worker not in waited_for]:
        reason += f"; did not wait for {names_of(sorted(ignored, key=natural))}"
    row = change.session.get_one(FragmentRow, (run.id, opening.number, index))
    if late and late not in _late_before(change, opening.number):
        message = f"round {opening.number}, first in fragment {index}: {reason}{_advice(run, late)}"
        change.record("late", message, round=opening.number, fragment=index, workers=late)
    closed = advance(fragment.state, "closed")
    row.state, row.reason, row.contributors, row.late = closed, reason, contributors, late
    row.closed_at = run.context.now()
    if fragment.quorum_at is not None:
        row.quorum_at = row.closed_at - (run.context.clock() - fragment.quorum_at)

    if index == 0:  # a worker's fragments contain the same work, so one check is enough
        report_equal_work(change, opening.number, index)

    def apply() -> None:
        fragment.state, fragment.closes_at, fragment.weights = closed, None, contributors

    change.after_commit(apply)


def _advice(run: LiveRun, late: Sequence[str]) -> str:
    """Return what to do about workers that rounds do not wait for from now on: without that, their work is lost each
    time, and nobody notices. Empty if there are none, or if late work counts."""
    given_up = [worker for worker in late if run.members.missed(worker) == MISSED - 1]
    if not given_up or run.spec.sync.wait == "never":
        return ""
    missed = f"{names_of(given_up)} missed {MISSED} rounds in a row"
    said = f". {missed}: rounds do not wait any more, and only work in time counts"
    return f'{said}. For slower boxes, leave sync.wait = "always" out of the spec'


def _late_before(change: Change, round_: int) -> list[list[str]]:
    """Return, for each closed fragment of the round, the live workers with an assignment that it closed without."""
    rows = select(FragmentRow.late).where(FragmentRow.run_id == change.run.id, FragmentRow.round == round_)
    return list(change.session.scalars(rows))
