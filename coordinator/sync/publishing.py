"""From collecting to published: close what is due, aggregate it, publish the delta, then step the outer state."""

import logging

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.runs import assigning, steering
from coordinator.runs.bell import delta_of
from coordinator.runs.epochs import check_epochs
from coordinator.runs.live_run import LiveRun, OpenRound
from coordinator.runs.rounds import Close, advance, decide, has_quorum
from coordinator.runs.units import tidy
from coordinator.store.database import disk_is_full
from coordinator.store.files import make_durable
from coordinator.store.tables import EventRow, FragmentRow, RoundRow
from coordinator.sync import checkpointing, outer_state
from coordinator.sync.delta_file import ContributionsLost, write_delta
from coordinator.sync.losing import lose_contributions
from protocol.messages import FragmentState, RunState

logger = logging.getLogger(__name__)

RETRY_S = 5.0


def close_due(run: LiveRun) -> None:
    """Look at every collecting fragment of the open round; close those that are due. Holds the lock."""
    if run.open is None or run.state is RunState.STOPPED:
        return
    now = run.world.clock()
    expected = run.open.assigned & run.leases.live()
    for index, fragment in enumerate(run.open.fragments):
        if fragment.state is not FragmentState.COLLECTING:
            continue
        contributed = fragment.contributed.keys()
        if fragment.quorum_at is None and has_quorum(expected, contributed, run.policy):
            fragment.quorum_at = now
        decision = decide(
            expected,
            contributed,
            run.policy,
            opened_at=run.open.opened_at,
            quorum_at=fragment.quorum_at,
            now=now,
        )
        fragment.reason = decision.reason
        if isinstance(decision, Close):
            _close(run, index, decision)
        else:
            fragment.closes_at = decision.until


def _close(run: LiveRun, index: int, decision: Close) -> None:
    """Fix the contributors, durably, and let the aggregation begin."""
    assert run.open is not None
    fragment = run.open.fragments[index]
    contributors = {worker: fragment.contributed[worker].tokens for worker in decision.contributors}
    late = sorted((run.open.assigned & run.leases.live()) - contributors.keys())
    with run.world.database.write() as session:
        row = session.get_one(FragmentRow, (run.id, run.open.number, index))
        row.state, row.reason, row.contributors = advance(fragment.state, "closed"), decision.reason, contributors
        row.closed_at = run.world.now()
        if fragment.quorum_at is not None:
            row.quorum_at = row.closed_at - (run.world.clock() - fragment.quorum_at)
        if late and not _told_late(run, session, late):
            message = f"round {run.open.number}, first in fragment {index}: {decision.reason}"
            run.record(session, "late", message, round=run.open.number, fragment=index, workers=late)
    fragment.state, fragment.closes_at = advance(fragment.state, "closed"), None
    start_job(run, index)


def _told_late(run: LiveRun, session: Session, workers: list[str]) -> bool:
    """Whether an event says already that a fragment of the open round closed without just these workers."""
    assert run.open is not None
    told = session.scalars(
        select(EventRow.data).where(
            EventRow.run_id == run.id,
            EventRow.kind == "late",
            EventRow.data["round"].as_integer() == run.open.number,
        )
    )
    return any(data["workers"] == workers for data in told)


def start_job(run: LiveRun, index: int) -> None:
    """On another thread: publish fragment `index` if it is due, and step the outer state. Holds the lock."""
    if index not in run.jobs:
        run.jobs.add(index)
        run.world.submit(_job, run, index)


def retry_jobs(run: LiveRun) -> None:
    """Take up again what a fault interrupted, a while after it."""
    with run.lock:
        if run.retry_at is None or run.world.clock() < run.retry_at:
            return
        run.retry_at = None
        for index in range(len(run.outer)):
            start_job(run, index)


def _job(run: LiveRun, index: int) -> None:
    """Step and publish until nothing is left to do. At most one job works on a fragment at a time.

    Everything in it is deterministic and leaves nothing half-done, so after any fault it is simply done again.
    """
    try:
        while True:
            outer_state.catch_up(run, index)
            checkpointing.keep_at_rest(run, index)
            with run.lock:
                opening = _due(run, index)
                stepped = run.outer[index][0] == run.round
                if opening is None and stepped and not checkpointing.owed_at_rest(run, index):
                    run.faults.pop(index, None)
                    run.jobs.discard(index)  # under the same lock as the look, so that no later work is missed
                    return
            if opening is not None:
                _publish(run, opening, index)
    except Exception as error:  # the job's thread has nobody to tell but the log and the events
        with run.lock:
            run.jobs.discard(index)
            run.retry_at = run.world.clock() + RETRY_S
            if disk_is_full(error):
                run.world.storage_full()
                return
            logger.exception("%s: fragment %d could not be published", run.name, index)
            if run.faults.get(index) == str(error):
                return
            with run.world.database.write() as session:
                message = f"fragment {index} could not be published: {error}; trying again every {RETRY_S:.0f} s"
                run.record(session, "fault", message, fragment=index)
            run.faults[index] = str(error)


def _due(run: LiveRun, index: int) -> OpenRound | None:
    """The open round if its fragment `index` is to be aggregated. Holds the lock."""
    aggregating = run.open is not None and run.open.fragments[index].state is FragmentState.AGGREGATING
    return run.open if aggregating and run.state is not RunState.STOPPED else None


def _publish(run: LiveRun, opening: OpenRound, index: int) -> None:
    """Aggregate fragment `index` into its durable delta; or collect again what the disk has lost of it."""
    fragment = opening.fragments[index]
    with run.lock:
        contributed, contents, base = dict(fragment.contributed), dict(fragment.contents), run.outer[index][1]
    try:
        delta = write_delta(run, opening.number, index, contributed, contents, base)
    except ContributionsLost as lost:
        with run.lock:
            lose_contributions(run, opening, index, lost.workers)
            close_due(run)
        return
    aggregated_at = run.world.now()
    contents.clear()
    fragment.contents.clear()
    try:
        make_durable(delta.path, run.files.delta(opening.number, index))
    finally:
        delta.path.unlink(missing_ok=True)
    run.world.room.keep(delta.digest, delta.content)
    with run.lock:
        _record_delta(run, opening, index, len(delta.content), delta.digest, aggregated_at)


def _record_delta(run: LiveRun, opening: OpenRound, index: int, size: int, digest: bytes, aggregated_at: float) -> None:
    """Publish: from here on the delta never changes. The last fragment ends the round. Holds the lock."""
    if run.state is RunState.STOPPED:  # while the delta was made
        return
    round_, fragment = opening.number, opening.fragments[index]
    last = all(other.state is FragmentState.PUBLISHED for other in opening.fragments if other is not fragment)
    finished = last and round_ + 1 == run.spec.sync.rounds
    with run.world.database.write() as session:
        row = session.get_one(FragmentRow, (run.id, round_, index))
        row.state, row.delta_bytes, row.delta_digest = advance(fragment.state, "published"), size, digest
        row.aggregated_at, row.published_at = aggregated_at, run.world.now()
        if last:
            session.get_one(RoundRow, (run.id, round_)).closed_at = run.world.now()
            run_row = run.row(session)
            run_row.round = round_ + 1
            tidy(session, run.id, round_ + 1)
            run.record(session, "round-published", f"round {round_} is published: {fragment.reason}", round=round_)
            check_epochs(run, session)
            if finished:
                run_row.state = RunState.FINISHED
                run.record(session, "finished", f"the run is finished after {run_row.round} rounds")
    fragment.state = advance(fragment.state, "published")
    run.deltas[round_, index] = digest
    run.wake(delta_of(index))
    if last:
        run.deltas = {key: kept for key, kept in run.deltas.items() if key[0] >= round_}
        run.open, run.previous, run.round = None, opening.assigned, round_ + 1
        if finished:
            run.state = RunState.FINISHED
            run.wake()
        for each in range(len(opening.fragments)):
            start_job(run, each)  # the outer steps
        assigning.try_open(run)
        steering.note_drained(run)
