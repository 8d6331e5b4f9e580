"""Publishing: aggregate closed fragments, publish their deltas, then step the outer state.

Each fragment has its own job on another thread. A job is deterministic and leaves nothing half done, so after any fault
it simply starts again.
"""

import logging
import math
from dataclasses import asdict
from functools import partial

from sqlalchemy import select

from coordinator.aggregation.fragment import (
    ContributionsLost,
    NoneValid,
    ResidualLost,
    aggregate_fragment,
    store_delta,
)
from coordinator.aggregation.tasks import Aggregate, Aggregated, Given
from coordinator.run.decide import advance
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.open_round import OpenFragment, OpenRound
from coordinator.run.outer import Job
from coordinator.run.schedule import round_steps, steps_trained
from coordinator.run.units.epochs import check_epochs
from coordinator.run.units.ledger import merge_adjacent, unconsume_units
from coordinator.run.waiters import delta_of
from coordinator.store.tables import ContributionRow, FragmentRow, RoundRow
from coordinator.sync import checkpointing, delegating, outer_state, retention
from coordinator.sync.deltas import previous_residual
from coordinator.trust.equal_work import report_similar_work
from coordinator.trust.verdicts import conclude_round, report_verdicts, screening, weights
from protocol.messages import FragmentState, RunState

logger = logging.getLogger(__name__)

RETRY_S = 5.0


def start_due(run: LiveRun) -> None:
    """Start the job of each fragment that has work, unless it is running. After a fault, wait RETRY_S seconds first."""
    now = run.context.clock()
    if run.outer.damage is not None:
        return
    for index, job in enumerate(run.outer.jobs):
        if not job.running and now >= job.retry_at and _is_due(run, index):
            job.running = True
            run.context.submit(_work, run, index, job)


def _is_due(run: LiveRun, index: int) -> bool:
    """Return True if fragment `index` must be aggregated, stepped or checkpointed."""
    behind = run.outer.states[index].round != run.round
    return behind or _aggregating(run, index) is not None or checkpointing.is_due_at_rest(run, index)


def _aggregating(run: LiveRun, index: int) -> OpenRound | None:
    """Return the open round if its fragment `index` must be aggregated, else None."""
    aggregating = run.open is not None and run.open.fragments[index].state is FragmentState.AGGREGATING
    return run.open if aggregating and run.state is not RunState.STOPPED else None


def _work(run: LiveRun, index: int, job: Job) -> None:
    """Step, checkpoint and publish fragment `index` until there is nothing left to do."""
    try:
        while True:
            outer_state.catch_up(run, index)
            outer_state.checkpoint_at_rest(run, index)
            with run.lock:
                opening = _aggregating(run, index)
                if opening is None and not _is_due(run, index):
                    # Under the same lock as the check, so that work added later starts a new job.
                    job.running, job.retry_at, job.fault = False, -math.inf, None
                    return
            if opening is not None:
                _publish(run, opening, index)
    except Exception as error:  # nothing awaits the job: the log and the events report it
        with run.lock:
            job.running, job.retry_at = False, run.context.clock() + RETRY_S
            if run.context.storage_failed(error) is not None:
                return
            if job.fault == str(error):
                return
            logger.exception("%s: fragment %d could not be published", run.name, index)
            with run.change() as change:
                message = f"fragment {index} could not be published: {error}; trying again every {RETRY_S:.0f} s"
                change.record("fault", message, fragment=index)
                change.after_commit(partial(setattr, job, "fault", str(error)))


def _publish(run: LiveRun, opening: OpenRound, index: int) -> None:
    """Aggregate fragment `index` into a durable delta and publish it. If the disk has lost contributions, collect them
    again instead."""
    fragment = opening.fragments[index]
    task = _task(run, opening, index)
    found = None if run.context.delegation is None else delegating.aggregate(run, run.context.delegation, task)
    try:
        if found is None:
            if task.usual is None:
                outer_state.bring_here(run, index)  # for the norm of θ
            with run.context.working:
                found = _aggregate_here(run, fragment, task)
    except (ContributionsLost, NoneValid) as lost:
        if isinstance(lost, NoneValid):
            run.not_direct.update(lost.workers)
        lose_contributions(run, opening, index, lost.workers, str(lost))
        return
    except ResidualLost as lost:
        _lose_residual(run, opening.number - 1, index, lost.damage)
        return
    fragment.contents.clear()
    run.not_direct.update(found.invalid)
    _record_delta(run, opening, index, found, run.context.now())


def _aggregate_here(run: LiveRun, fragment: OpenFragment, task: Aggregate) -> Aggregated:
    """Do the task in this process. Raises like `aggregate_fragment`."""
    with run.lock:
        measures = {worker: each.measured for worker, each in fragment.contributed.items() if each.measured is not None}
        contents = dict(fragment.contents)
    theta_norm = partial(outer_state.theta_norm, run, task.fragment, task.round)
    delta = aggregate_fragment(task, run.blobs, run.context.secret, theta_norm, measures=measures, contents=contents)
    return store_delta(task, delta, run.blobs, run.context.memory)


def _task(run: LiveRun, opening: OpenRound, index: int) -> Aggregate:
    """Describe the aggregation of a closed fragment."""
    assert run.model is not None, "a round has a layout"
    fragment, judged = opening.fragments[index], screening(run, opening.number, index)
    is_asked = run.context.delegation is not None and judged.usual is None
    state = delegating.checkpoint_blob(run, opening.number, index) if is_asked else None
    with run.lock:
        base, tokens, contributed = run.outer.states[index].digest, fragment.weights, dict(fragment.contributed)
    unit_tokens = {worker: run.unit_tokens(worker) for worker in contributed}
    done = {worker: max(each.tokens, each.lateness.units * unit_tokens[worker]) for worker, each in contributed.items()}
    work = weights(done, run.spec.sync)
    return Aggregate(
        run=run.name,
        round=opening.number,
        fragment=index,
        elements=run.model.layout.elements[index],
        base=base,
        sync=run.spec.sync,
        contributions={
            worker: Given(
                digest=each.digest,
                sha256=each.sha256,
                tokens=tokens[worker],
                work=work[worker],
                lateness=each.lateness,
            )
            for worker, each in contributed.items()
        },
        unit_tokens=unit_tokens,
        **judged._asdict(),
        state=state,
        excluded={worker: why for worker, why in run.members.harmful(opening.number).items() if worker in contributed},
        residual=previous_residual(run, opening.number, index),
    )


def _record_delta(
    run: LiveRun,
    opening: OpenRound,
    index: int,
    found: Aggregated,
    aggregated_at: float,
) -> None:
    """Publish the durable delta, which never changes again. The last fragment of a round also ends the round."""
    round_, fragment, judgement = opening.number, opening.fragments[index], found.judgement
    with run.change() as change:
        if run.state is RunState.STOPPED:  # it was stopped while the delta was made
            return
        session, now = change.session, run.context.now()
        last = all(other.state is FragmentState.PUBLISHED for other in opening.fragments if other is not fragment)
        published = advance(fragment.state, "published")
        row = session.get_one(FragmentRow, (run.id, round_, index))
        report_verdicts(change, round_, index, judgement)
        row.reference = judgement.reference
        row.verdicts = {worker: asdict(verdict) for worker, verdict in judgement.verdicts.items()}
        report_similar_work(change, round_, index, judgement)
        if last:
            session.flush()
            conclude_round(change, opening)
        steps = steps_trained(run, session) if last else 0
        finished = last and run.step + steps == run.spec.total_inner_steps
        row.state, row.delta_bytes, row.delta_digest = published, found.size, found.digest
        if found.residual is not None:
            row.residual_bytes, row.residual_digest = found.residual.size, found.residual.digest
        row.aggregated_at, row.published_at = aggregated_at, now
        if last:
            session.get_one(RoundRow, (run.id, round_)).closed_at = now
            change.end_round(opening, steps)
            merge_adjacent(session, run.id, round_ + 1, settled=retention.oldest_checkpoint(run))
            change.record("round-published", f"round {round_} is published: {fragment.reason}", round=round_)
            if steps < round_steps(run):
                message = f"in round {round_} every worker contributed after {steps} of {round_steps(run)} inner steps"
                change.record("short-round", f"{message}; the other steps follow in later rounds", round=round_)
            check_epochs(change)
            if finished:
                change.set_state(RunState.FINISHED)
                change.record("finished", f"the run is finished after {round_ + 1} rounds")

        def apply() -> None:
            fragment.state = published
            run.counters.count_judged(verdict.factor for verdict in judgement.verdicts.values())
            run.outer.add_delta(round_, index, found.digest, last=last)

        change.after_commit(apply)
        change.wake(None if finished else delta_of(index))


# --- lost blobs -------------------------------------------------------------------------------------------------------


def _lose_residual(run: LiveRun, round_: int, index: int, damage: str) -> None:
    """Continue without the residual of the delta of `round_`, which the disk has lost."""
    with run.change() as change:
        row = change.session.get_one(FragmentRow, (run.id, round_, index))
        digest, row.residual_bytes, row.residual_digest = row.residual_digest, None, None
        message = (
            f"the residual of the delta of round {round_}, fragment {index}, is {damage} on disk; the next delta is "
            "made without it"
        )
        change.record("corrupt", message, round=round_, fragment=index)
    if digest is not None:
        run.blobs.delete(run.names.residual(round_, index, digest))


def lose_contributions(run: LiveRun, opening: OpenRound, index: int, workers: list[str], why: str) -> None:
    """Remove the contributions of `workers` to fragment `index`, which the disk has lost, and collect them again.

    Without redundant disks the coordinator cannot recover them. But each worker keeps its acknowledged contribution in
    memory until the round is over, so it is asked to send it again (`contribution-lost`).
    """
    fragment, round_ = opening.fragments[index], opening.number
    with run.change() as change:
        session, collecting = change.session, advance(fragment.state, "contribution lost")
        row = session.get_one(FragmentRow, (run.id, round_, index))
        row.state, row.reason, row.contributors, row.quorum_at, row.closed_at = collecting, "", None, None, None
        for worker in workers:
            _forget(change, session.get_one(ContributionRow, (run.id, round_, index, worker)))
        message = f"round {round_}, fragment {index}: {why}"
        change.record("contribution-lost", message, round=round_, fragment=index, workers=workers)

        def apply() -> None:
            for worker in workers:
                lost = fragment.contributed.pop(worker)
                name = run.names.contribution(round_, index, worker, lost.digest)
                run.uploads.note_vanished(name)
                run.blobs.delete(name)
            fragment.state, fragment.quorum_at, fragment.weights = collecting, None, {}
            opening.without_earlier_units.clear()
            opening.consumed.clear()

        change.after_commit(apply)
        change.wake()


def _forget(change: Change, row: ContributionRow) -> None:
    """Delete the row and subtract it from the counters. If it is the worker's last row of the round, its units are no
    longer consumed."""
    run, session, run_row = change.run, change.session, change.row
    worker = change.worker_row(row.worker)
    worker.upload_bytes -= row.size
    run_row.upload_bytes -= row.size
    session.delete(row)
    session.flush()
    others = session.scalars(
        select(ContributionRow.fragment)
        .where(
            ContributionRow.run_id == run.id,
            ContributionRow.round == row.round,
            ContributionRow.worker == row.worker,
        )
        .limit(1)
    ).first()
    if others is None:
        units = unconsume_units(session, run.id, row.worker, row.round, live=row.worker in run.members)
        tokens = units * run.unit_tokens(row.worker)
        run_row.tokens -= tokens
        worker.contributions -= 1
        worker.tokens -= tokens
