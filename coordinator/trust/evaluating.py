"""Which workers measure the held-out loss of a state, and whose measurement is accepted.

If all workers hold out the same text, three workers with different tokens measure each evaluated state, of six tokens
and more five, and the workers take turns. A measurement counts if most of them agree. So the run never depends on a
single worker's measurement, and one that differs is found at once: it is not asked for the next NOT_ASKED evaluated
states. With private data every worker measures its own held-out text, and nothing is compared.

The reply to a measurement may ask for more: the loss without one of the contributions (`leaving_out.py`).
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.run.live_run import Change, LiveRun, Redo
from coordinator.store.tables import AssignmentRow, EvaluationRow, WorkerRow
from coordinator.trust import leaving_out
from coordinator.trust.guard import check_loss
from outerstep.common.quantities import natural
from protocol.errors import Problem
from protocol.messages import Evaluation, EvaluationReply, EvaluationReport, RunState, WithoutReport

NOT_ASKED = 16  # evaluated states
NEAR = 0.05  # nats per token; differences in hardware and precision cause a tenth of that


def is_evaluated(run: LiveRun) -> bool:
    """Return True if the starting state of the open or next round must be evaluated."""
    return run.round % run.spec.evaluation.every_rounds == 0


def evaluators(run: LiveRun, session: Session, workers: Sequence[str]) -> set[str]:
    """Return which of the next round's `workers` evaluate the round's starting state."""
    if not is_evaluated(run):
        return set()
    if run.spec.data.private:
        return set(workers)
    every = run.spec.evaluation.every_rounds
    refuted = _refuted_workers(run, session, run.round - NOT_ASKED * every)
    trusted = [worker for worker in workers if worker not in refuted] or list(workers)
    tokens = {worker: run.members.token(worker) for worker in trusted}
    return set(in_turn(trusted, tokens, run.round // every, most_evaluators(set(tokens.values()))))


def most_evaluators(tokens: Collection[str | None]) -> int:
    """Return how many workers with different tokens evaluate a state: most of them agree even if some lie together.
    Pure."""
    return 2 * leaving_out.liars(len(tokens)) + 1


def is_missing(run: LiveRun, worker: str, asked: Collection[str]) -> bool:
    """Return True if a state has too few evaluators, the workers `asked`, and none with the token of `worker`."""
    owners = run.members.owners
    few = len(asked) < most_evaluators(set(owners.values()))
    return few and owners.get(worker) not in {owners.get(each) for each in asked}


def in_turn(workers: Sequence[str], tokens: Mapping[str, str | None], turn: int, count: int) -> list[str]:
    """Return up to `count` workers, no two with the same token. `turn`: the index in `workers` to start from."""
    chosen: dict[str | None, str] = {}
    for k in range(len(workers)):
        worker = workers[(turn + k) % len(workers)]
        if len(chosen) < count:
            chosen.setdefault(tokens[worker], worker)
    return list(chosen.values())


def _refuted_workers(run: LiveRun, session: Session, since: int) -> set[str]:
    """Return the workers whose measurement of state `since` or a later one was refuted."""
    refuted = select(WorkerRow.name).where(WorkerRow.run_id == run.id, WorkerRow.refuted_state >= since)
    return set(session.scalars(refuted))


def record_evaluation(run: LiveRun, worker: str, round_: int, redone: int, report: EvaluationReport) -> EvaluationReply:
    """Record the held-out loss of state `round_`. The worker's first report counts; later ones are ignored. Return what
    else it should measure. `redone`: as in the worker's assignment. A report of a state that was replaced since may
    arrive at any time.

    Raises Problem: round-not-open; not-asked, if the worker was not asked to evaluate that state.
    """
    with run.change() as change:
        if round_ > run.round:
            raise Problem("round-not-open", f"state {round_} does not exist yet; the run is at {run.round}")
        _check_redone(run, round_, redone)
        if not _was_asked(change, worker, round_):
            raise Problem("not-asked", f"{worker} was not asked to evaluate state {round_} of the run {run.name}")
        session = change.session
        measured = select(EvaluationRow).where(EvaluationRow.run_id == run.id, EvaluationRow.round == round_)
        rows = {row.worker: row for row in session.scalars(measured)}
        reply = EvaluationReply(without=leaving_out.to_measure(run, session, round_, report.loss))
        if worker in rows:
            return reply
        rows[worker] = EvaluationRow(run_id=run.id, round=round_, worker=worker, **report.model_dump())
        session.add(rows[worker])
        bits = Evaluation(**report.model_dump()).bits_per_byte
        bits_text = "" if bits is None else f", {bits:.4f} bits per byte"
        private = run.spec.data.private
        source = f", on the held-out data of {worker}, which reported first" if private else f", measured by {worker}"
        message = f"state {round_}: held-out loss {report.loss:.4f} nats per token{bits_text}{source}"
        if len(rows) == 1:  # one event per worker and round would crowd out all other events
            change.record("evaluated", message, round=round_, worker=worker)
        if not private:
            _compare(change, round_, rows)
        check_loss(change)
    return reply


def record_without(run: LiveRun, worker: str, round_: int, redone: int, report: WithoutReport) -> None:
    """Record the losses of state `round_` without each of some contributions. The worker's first report counts.
    `redone`: as in its assignment.

    Raises Problem `not-asked` if the worker has not evaluated that state before.
    """
    with run.change() as change:
        _check_redone(run, round_, redone)
        row = change.session.get(EvaluationRow, (run.id, round_, worker))
        if row is None:
            raise Problem("not-asked", f"{worker} has not evaluated state {round_} of the run {run.name}")
        if row.without is None:
            row.without = report.model_dump()
            change.session.flush()
            note_harmful(change)


def _check_redone(run: LiveRun, round_: int, redone: int) -> None:
    """Raise Problem `not-asked` if a round was done again since the assignment that asked for the measurement."""
    if redone != run.redone:
        detail = (
            f"state {round_} was measured for an assignment with redone = {redone}, and {run.redone} rounds were done"
        )
        raise Problem("not-asked", f"{detail} again by now: measure the state that the next assignment asks for")


def note_harmful(change: Change) -> None:
    """If workers are found whose contributions have harmed the run's state, have the round done again without them."""
    run = change.run
    known = run.members.harmful(run.round)  # if the round could not be done again
    found = leaving_out.found_harmful(run, change.session, run.round)
    found = {worker: measured for worker, measured in found.items() if worker not in known}
    if found and run.redo is None:
        change.after_commit(partial(setattr, run, "redo", Redo(run.round, found)))


def far_from_majority(losses: Mapping[str, float]) -> set[str] | None:
    """Return the workers with a loss further than NEAR from the median; None if no majority is within NEAR of it.
    Pure."""
    median = statistics.median_low(losses.values())
    far = {worker for worker, loss in losses.items() if abs(loss - median) > NEAR}
    return far if 2 * len(far) < len(losses) else None


def _compare(change: Change, round_: int, rows: Mapping[str, EvaluationRow]) -> None:
    """Set `confirmed` on each measurement of the state. Record an event if the measurements differ, or if one differs
    from those of most workers that were asked."""
    far, asked = far_from_majority({worker: row.loss for worker, row in rows.items()}), _number_asked(change, round_)
    enough = far is not None and 2 * (len(rows) - len(far)) > asked
    for worker, row in rows.items():
        row.confirmed = enough and worker not in (far or ())
    losses = ", ".join(f"{worker} {rows[worker].loss:.4f}" for worker in sorted(rows, key=natural))
    if far is None and len(rows) == 2:
        message = f"state {round_}: the held-out losses differ ({losses}); neither counts unless most workers agree"
        change.record("evaluations-differ", message, round=round_, workers=sorted(rows))
    for worker in sorted(far or ()):
        if enough:
            member = change.worker_row(worker)
            member.refuted_state = max(round_, -1 if member.refuted_state is None else member.refuted_state)
            message = f"state {round_}: the held-out loss of {worker} is far from the others' ({losses}); it is not"
            change.record("evaluation-refuted", f"{message} asked for a while", round=round_, worker=worker)


def _number_asked(change: Change, round_: int) -> int:
    """Return how many workers were asked to evaluate the state."""
    run = change.run
    if run.state is RunState.FINISHED and round_ == run.round:
        return len(run.members.evaluators)
    asked = select(func.count()).where(
        AssignmentRow.run_id == run.id, AssignmentRow.round == round_, AssignmentRow.evaluate
    )
    return change.session.scalars(asked).one()


def _was_asked(change: Change, worker: str, round_: int) -> bool:
    """Return True if the worker was asked to evaluate the state: in its assignment for the round that starts from it,
    or, for the final state, at the end of the run."""
    run = change.run
    if run.state is RunState.FINISHED and round_ == run.round:
        evaluators = run.members.evaluators  # empty after a restart: then any worker may report
        return run.spec.data.private or not evaluators or worker in evaluators
    row = change.session.get(AssignmentRow, (run.id, round_, worker))
    return row is not None and row.evaluate
