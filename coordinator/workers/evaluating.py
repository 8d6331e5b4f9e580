"""The held-out loss of a run's states, as its workers measure it."""

from coordinator.runs import held_out
from coordinator.runs.live_run import LiveRun
from coordinator.store.tables import EvaluationRow
from protocol.errors import Problem
from protocol.messages import Evaluation, EvaluationReport


def evaluated(run: LiveRun, worker: str, round_: int, report: EvaluationReport) -> None:
    """Record the held-out loss of state `round_`; a later report of the worker replaces its earlier one."""
    with run.change() as change:
        if round_ > run.round:
            raise Problem("round-not-open", f"state {round_} does not exist yet; the run is at {run.round}")
        first = not held_out.evaluations(change.session, run.id, round_)
        change.session.merge(EvaluationRow(run_id=run.id, round=round_, worker=worker, **report.model_dump()))
        bits = Evaluation(**report.model_dump()).bits_per_byte
        compared = "" if bits is None else f", {bits:.4f} bits per byte"
        private = run.spec.data.private
        where = f", on what {worker} holds out, the first to tell" if private else ""
        message = f"state {round_}: held-out loss {report.loss:.4f} nats per token{compared}{where}"
        if first or not private:  # an event of every worker in every round would leave room for no others
            change.record("evaluated", message, round=round_, worker=worker)
