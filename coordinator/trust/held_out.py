"""The held-out loss of a state: the mean over the workers that have measured it, weighted by tokens.

Two measure it for all, as all hold out the same text (`evaluators.py`); where each brings its own, all of them do.
"""

from collections.abc import Collection, Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from coordinator.store.tables import EvaluationRow
from protocol.messages import Evaluation

ALL = ""  # the worker of a mean over several


def evaluations(session: Session, run_id: int, round_: int) -> dict[str, Evaluation]:
    """Return what was measured of state `round_`, by worker."""
    return evaluations_of(session, run_id, [round_]).get(round_, {})


def evaluations_of(session: Session, run_id: int, rounds: Sequence[int]) -> dict[int, dict[str, Evaluation]]:
    """Return what was measured of the states from the least to the last of `rounds`, by round and worker."""
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
    """Return the mean, weighted by tokens, of what several have measured and is confirmed; where nothing is, the
    largest, for of two that differ the model is taken for no better than the worse; None of nothing."""
    confirmed = [each for each in measured if each.confirmed]
    if not confirmed:
        return max(measured, key=lambda each: each.loss, default=None)
    measured = confirmed
    if len(measured) == 1:  # not even rounding may change what one worker has measured for all
        return measured[0]
    tokens = sum(each.tokens for each in measured)
    sizes = [each.bytes for each in measured if each.bytes is not None]
    return Evaluation(
        loss=sum(each.loss * each.tokens for each in measured) / tokens,
        tokens=tokens,
        bytes=sum(sizes) if len(sizes) == len(measured) else None,
    )


def sum_up(session: Session, run_id: int, before: int) -> None:
    """Replace what several workers have measured of a state before `before` by its mean."""
    of_several = (
        select(EvaluationRow.round)
        .where(EvaluationRow.run_id == run_id, EvaluationRow.round < before)
        .group_by(EvaluationRow.round)
        .having(func.count() > 1)
    )
    for round_ in session.scalars(of_several).all():
        found = mean(evaluations(session, run_id, round_).values())
        assert found is not None
        session.execute(delete(EvaluationRow).where(EvaluationRow.run_id == run_id, EvaluationRow.round == round_))
        stored = found.model_dump(include={"loss", "tokens", "bytes", "confirmed"})
        session.add(EvaluationRow(run_id=run_id, round=round_, worker=ALL, **stored))
