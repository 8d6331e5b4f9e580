"""The held-out loss of a state: the mean over the workers that measured it, weighted by tokens. `evaluating.py` decides
which workers measure it and whose measurement is confirmed."""

from collections.abc import Collection, Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from coordinator.store.tables import EvaluationRow
from protocol.messages import Evaluation

ALL = ""  # worker name of a row with the mean of several workers


def evaluations(session: Session, run_id: int, round_: int) -> dict[str, Evaluation]:
    """Return the measurements of state `round_`, by worker."""
    return evaluations_of(session, run_id, [round_]).get(round_, {})


def evaluations_of(session: Session, run_id: int, rounds: Sequence[int]) -> dict[int, dict[str, Evaluation]]:
    """Return the measurements of the states between the first and the last of `rounds`, by round and worker."""
    if not rounds:
        return {}
    found: dict[int, dict[str, Evaluation]] = {}
    rows = session.scalars(
        select(EvaluationRow)
        .where(EvaluationRow.run_id == run_id, EvaluationRow.round.between(min(rounds), max(rounds)))
        .order_by(EvaluationRow.round, EvaluationRow.worker)
    )
    for row in rows:
        found.setdefault(row.round, {})[row.worker] = evaluation(row)
    return found


def evaluation(row: EvaluationRow) -> Evaluation:
    return Evaluation(loss=row.loss, tokens=row.tokens, bytes=row.bytes, confirmed=row.confirmed)


def mean(measured: Collection[Evaluation]) -> Evaluation | None:
    """Return the mean of the confirmed measurements, weighted by tokens; None if nothing was measured. If none is
    confirmed, return the largest: the model must not look better than the worse of two measurements that differ."""
    confirmed = [each for each in measured if each.confirmed]
    if not confirmed:
        return max(measured, key=lambda each: each.loss, default=None)
    if len(confirmed) == 1:  # not even rounding may change a single measurement
        return confirmed[0]
    tokens = sum(each.tokens for each in confirmed)
    sizes = [each.bytes for each in confirmed if each.bytes is not None]
    return Evaluation(
        loss=sum(each.loss * each.tokens for each in confirmed) / tokens,
        tokens=tokens,
        bytes=sum(sizes) if len(sizes) == len(confirmed) else None,
    )


def replace_by_means(session: Session, run_id: int, before: int) -> None:
    """Replace the measurements of each state before `before` by their mean, if there are several."""
    several = (
        select(EvaluationRow.round)
        .where(EvaluationRow.run_id == run_id, EvaluationRow.round < before)
        .group_by(EvaluationRow.round)
        .having(func.count() > 1)
    )
    for round_ in session.scalars(several).all():
        found = mean(evaluations(session, run_id, round_).values())
        assert found is not None
        session.execute(delete(EvaluationRow).where(EvaluationRow.run_id == run_id, EvaluationRow.round == round_))
        stored = found.model_dump(include={"loss", "tokens", "bytes", "confirmed"})
        session.add(EvaluationRow(run_id=run_id, round=round_, worker=ALL, **stored))
