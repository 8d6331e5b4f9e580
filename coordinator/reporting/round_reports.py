"""What the REST interface shows of rounds, and what a run waits for.

Replies are built from the database and, for the open round, from the run in memory. Memory is read first, so a client
that was woken by a change sees it. The run's lock is not held while the database is read. If a round opens or closes
meanwhile, it is shown as in the database.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.reporting.waits import RoundTimes, adds_of, waiting, waits_of
from coordinator.rounds import accounting
from coordinator.rounds.opening import awaited_silent_workers, fault_of, status, waits_for
from coordinator.run.live_run import LiveRun
from coordinator.run.open_round import OpenFragment, OpenRound
from coordinator.run.schedule import expected_rounds
from coordinator.store.tables import AssignmentRow, ContributionRow, FragmentRow, LateContributionRow, RoundRow
from coordinator.sync import retention
from coordinator.trust import held_out
from protocol.errors import Problem
from protocol.messages import (
    Account,
    Cause,
    Evaluation,
    FragmentInfo,
    FragmentState,
    LateContribution,
    Page,
    RoundDetail,
    RoundInfo,
    RunState,
    Verdict,
)

ADVANCEMENT = list(FragmentState)


def reason_of(run: LiveRun) -> str:
    """Return what the run is doing or waiting for."""
    if run.ended:
        ended = f"the run is {run.state} after {run.round} of {expected_rounds(run)} rounds"
        return ended if run.outer.damage is None else f"{ended}; {run.outer.damage}"
    opening = run.open
    if opening is None or fault_of(run) is not None:
        return status(run)
    return f"round {opening.number}: {_fragment_reason(run, _least_advanced(opening))}"


def held_up_by(run: LiveRun) -> Cause | None:
    """Return the most serious cause that holds up the run; None if nothing is wrong."""
    if (fault := fault_of(run)) is not None:
        return fault.cause
    if run.open is not None:
        silent = _least_advanced(run.open).silent and run.state is not RunState.STOPPED
    else:
        silent = run.state is RunState.RUNNING and run.model is not None and bool(awaited_silent_workers(run))
    return Cause.WORKER_SILENT if silent else None


def _least_advanced(opening: OpenRound) -> OpenFragment:
    """Return the least advanced fragment, whose state and reason are shown for the open round."""
    return min(opening.fragments, key=lambda each: ADVANCEMENT.index(each.state))


def _fragment_reason(run: LiveRun, fragment: OpenFragment) -> str:
    """Return what a fragment of the open round waits for; after a stop, that the round was abandoned."""
    given_up = run.state is RunState.STOPPED and fragment.state is not FragmentState.PUBLISHED
    return "given up: the run was stopped" if given_up else waits_for(run, fragment)


def _closes_in_s(run: LiveRun, fragment: OpenFragment) -> float | None:
    """Return the seconds until a fragment of the open round closes; None if no deadline is running."""
    if fragment.closes_at is None or run.state is RunState.STOPPED:
        return None
    return max(0.0, fragment.closes_at - run.context.clock())


def rounds(run: LiveRun, limit: int, before: int | None) -> Page[RoundInfo]:
    """Return the rounds before `before` (None: all), newest first."""
    opening = _open_round(run)
    with run.context.database.read() as session:
        query = select(RoundRow).where(RoundRow.run_id == run.id).order_by(RoundRow.round.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(RoundRow.round < before)
        rows = session.scalars(query).all()
        items = [RoundInfo(**fields) for fields in _round_fields(run, session, rows[:limit], opening)]
    return Page(items=items, next=str(items[-1].round) if len(rows) > limit else None)


def round_detail(run: LiveRun, number: int | None) -> RoundDetail:
    """Return a round and its fragments; None: the open or next round. Raises Problem `not-found` if it was not
    opened."""
    opening = _open_round(run)
    number = run.round if number is None else number
    with run.context.database.read() as session:
        row = session.get(RoundRow, (run.id, number))
        if row is None:
            raise Problem("not-found", f"round {number} of the run {run.name} was not opened: {reason_of(run)}")
        rows = session.scalars(
            select(FragmentRow)
            .where(FragmentRow.run_id == run.id, FragmentRow.round == number)
            .order_by(FragmentRow.fragment)
        ).all()
        fragments = [_fragment(run, each, None if row.closed_at is not None else opening) for each in rows]
        late = session.scalars(
            select(LateContributionRow)
            .where(LateContributionRow.run_id == run.id, LateContributionRow.round == number)
            .order_by(LateContributionRow.worker, LateContributionRow.fragment)
        )
        (fields,) = _round_fields(run, session, [row], opening)
        accounts = accounting.by_worker(session, run.id, number)
        sent_at, tokens = _sent(session, run, number)
        times = RoundTimes(max(len(fragments), 1), fields["collected_at"], fields["closed_at"], sent_at)
        waits = {worker: waits_of(worker, account, times) for worker, account in accounts.items()}
        return RoundDetail(
            **fields,
            fragments=fragments,
            evaluations=_by_worker(held_out.evaluations(session, run.id, number)),
            accounts=accounts,
            waits=waits,
            waiting=waiting(accounts, waits, run.spec.sync),
            adds={}
            if row.closed_at is None or row.tokens is not None  # then its contributions are deleted
            else adds_of(_assigned(session, run, number), tokens, _weights(rows), times, waits),
            late=[LateContribution(worker=each.worker, fragment=each.fragment, late_s=each.late_s) for each in late],
        )


def _sent(session: Session, run: LiveRun, number: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return when the last contribution of each worker to the round was accepted, and the tokens of all of them."""
    row = ContributionRow
    query = select(row.worker, func.max(row.accepted_at), func.sum(row.tokens)).where(
        row.run_id == run.id, row.round == number
    )
    found = session.execute(query.group_by(row.worker)).all()
    return {worker: at for worker, at, _ in found}, {worker: int(tokens) for worker, _, tokens in found}


def _weights(rows: Sequence[FragmentRow]) -> dict[str, float]:
    """Return the weight with which each worker counts in the deltas of a round, in tokens, over all fragments."""
    counts: dict[str, float] = defaultdict(float)
    for row in rows:
        for worker, tokens in (row.contributors or {}).items():
            counts[worker] += tokens * row.verdicts.get(worker, {}).get("factor", 1.0)
    return counts


def _assigned(session: Session, run: LiveRun, number: int) -> Sequence[str]:
    return session.scalars(
        select(AssignmentRow.worker).where(AssignmentRow.run_id == run.id, AssignmentRow.round == number)
    ).all()


def _open_round(run: LiveRun) -> OpenRound | None:
    """Return the open round, after waiting until a change in progress is in the database."""
    with run.briefly_locked():
        return run.open


def _round_fields(
    run: LiveRun, session: Session, rows: Sequence[RoundRow], opening: OpenRound | None
) -> Iterator[dict[str, Any]]:
    """Yield the fields shown of each round. The number of queries does not grow with the number of rounds."""
    numbers = [row.round for row in rows]
    measured = held_out.evaluations_of(session, run.id, numbers)
    not_summed_up = [row.round for row in rows if row.tokens is None]
    sums = retention.sums_of(session, run.id, not_summed_up)
    latest = retention.latest_of(session, run.id, not_summed_up)
    for row in rows:
        tokens, loss, upload_bytes, delta_bytes = sums.get(
            row.round, (row.tokens or 0, row.loss, row.upload_bytes or 0, row.delta_bytes or 0)
        )
        quorum_at, collected_at, aggregated_at = latest.get(
            row.round, (row.quorum_at, row.collected_at, row.aggregated_at)
        )
        state, reason, closes_in_s = FragmentState.PUBLISHED, "published", None
        if row.closed_at is None:
            state, reason = FragmentState.COLLECTING, "just opened"
            if opening is not None and opening.number == row.round:
                fragment = _least_advanced(opening)
                state, reason, closes_in_s = (
                    fragment.state,
                    _fragment_reason(run, fragment),
                    _closes_in_s(run, fragment),
                )
        yield {
            "round": row.round,
            "state": state,
            "reason": reason,
            "opened_at": row.opened_at,
            "closes_in_s": closes_in_s,
            "quorum_at": quorum_at,
            "collected_at": collected_at,
            "aggregated_at": aggregated_at,
            "closed_at": row.closed_at,
            "tokens": tokens,
            "loss": loss,
            **held_out_fields(measured.get(row.round, {})),
            "upload_bytes": upload_bytes,
            "delta_bytes": delta_bytes,
            "account": Account.model_validate(row.account),
        }


def _by_worker(measured: dict[str, Evaluation]) -> dict[str, Evaluation]:
    return {worker: each for worker, each in measured.items() if worker != held_out.ALL}


def held_out_fields(measured: dict[str, Evaluation]) -> dict[str, Any]:
    """Return the fields for the held-out loss of a state. `measured`: its measurements by worker."""
    mean = held_out.mean(measured.values())
    return {
        "held_out_loss": None if mean is None else mean.loss,
        "held_out_bits_per_byte": None if mean is None else mean.bits_per_byte,
    }


def _fragment(run: LiveRun, row: FragmentRow, opening: OpenRound | None) -> FragmentInfo:
    contributors, reason, closes_in_s = row.contributors or {}, row.reason, None
    if opening is not None and opening.number == row.round:
        fragment = opening.fragments[row.fragment]
        contributors, reason = fragment.contributed, _fragment_reason(run, fragment)
        closes_in_s = _closes_in_s(run, fragment)
    return FragmentInfo(
        fragment=row.fragment,
        state=FragmentState(row.state),
        reason=reason,
        contributors=sorted(contributors),
        verdicts={worker: Verdict.model_validate(each) for worker, each in row.verdicts.items()},
        reference=row.reference,
        closes_in_s=closes_in_s,
        quorum_at=row.quorum_at,
        closed_at=row.closed_at,
        aggregated_at=row.aggregated_at,
        published_at=row.published_at,
        delta_bytes=row.delta_bytes,
        delta_digest=None if row.delta_digest is None else row.delta_digest.hex(),
    )
