"""The held-out loss of a run's states, as its workers measure it."""

from collections.abc import Mapping

from sqlalchemy import func, select

from coordinator.run.live_run import Change, LiveRun
from coordinator.screening.agreeing import alone
from coordinator.store.tables import AssignmentRow, EvaluationRow
from coordinator.trust import guard as guarding
from coordinator.trust.evaluators import IN_DOUBT, USUALLY
from outerstep.common.quantities import natural
from protocol.errors import Problem
from protocol.messages import Evaluation, EvaluationReport, RunState


def evaluated(run: LiveRun, worker: str, round_: int, report: EvaluationReport) -> None:
    """Record the held-out loss of state `round_`. The worker's first report stands; a later one changes nothing.

    Raises Problem: round-not-open; not-asked, for a state that others were to evaluate.
    """
    with run.change() as change:
        if round_ > run.round:
            raise Problem("round-not-open", f"state {round_} does not exist yet; the run is at {run.round}")
        if not _was_asked(change, worker, round_):
            raise Problem("not-asked", f"{worker} was not asked to evaluate state {round_} of the run {run.name}")
        session = change.session
        measured = select(EvaluationRow).where(EvaluationRow.run_id == run.id, EvaluationRow.round == round_)
        rows = {row.worker: row for row in session.scalars(measured)}
        if worker in rows:
            return
        rows[worker] = EvaluationRow(run_id=run.id, round=round_, worker=worker, **report.model_dump())
        session.add(rows[worker])
        bits = Evaluation(**report.model_dump()).bits_per_byte
        compared = "" if bits is None else f", {bits:.4f} bits per byte"
        private = run.spec.data.private
        where = f", on what {worker} holds out, the first to tell" if private else f", by {worker}"
        message = f"state {round_}: held-out loss {report.loss:.4f} nats per token{compared}{where}"
        if len(rows) == 1:  # an event of every worker in every round would leave room for no others
            change.record("evaluated", message, round=round_, worker=worker)
        if not private:
            _compare(change, round_, rows)
        guarding.look_at_the_loss(change)


def _compare(change: Change, round_: int, rows: Mapping[str, EvaluationRow]) -> None:
    """Note which of those who have measured the same are confirmed by the others; tell who differ, and who is alone."""
    far = alone({worker: row.loss for worker, row in rows.items()})
    enough = len(rows) >= min(_asked(change, round_), USUALLY)
    for worker, row in rows.items():
        row.confirmed = enough and far is not None and worker not in far
    said = ", ".join(f"{worker} says {rows[worker].loss:.4f}" for worker in sorted(rows, key=natural))
    if far is None and len(rows) == USUALLY:
        message = f"state {round_}: who measured the held-out loss differ: {said}; of the next one three are asked"
        change.record("evaluations-differ", message, round=round_, workers=sorted(rows))
    for worker in sorted(far or ()):
        if len(rows) == IN_DOUBT:
            message = f"state {round_}: {worker} is alone with its held-out loss: {said}; it is not asked for a while"
            change.record("evaluation-refuted", message, round=round_, worker=worker)


def _asked(change: Change, round_: int) -> int:
    """Return how many workers were asked to evaluate the state."""
    run = change.run
    if run.state is RunState.FINISHED and round_ == run.round:
        return len(run.members.evaluators)
    asked = select(func.count()).where(
        AssignmentRow.run_id == run.id, AssignmentRow.round == round_, AssignmentRow.evaluate
    )
    return change.session.scalars(asked).one()


def _was_asked(change: Change, worker: str, round_: int) -> bool:
    """Return True if the worker's assignment for the round that starts from the state said so, or it is at the end."""
    run = change.run
    if run.state is RunState.FINISHED and round_ == run.round:
        return (
            run.spec.data.private or not run.members.evaluators or worker in run.members.evaluators
        )  # none: since a restart
    row = change.session.get(AssignmentRow, (run.id, round_, worker))
    return row is not None and row.evaluate
