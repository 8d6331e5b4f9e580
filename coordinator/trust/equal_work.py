"""Reports workers that send the same contribution, or nearly the same. Such workers train on the same data, so the run
gets the work of only one of them. Reported groups are kept in `runs.equal_work`, and each is reported once."""

from collections import defaultdict

from sqlalchemy import select

from coordinator.aggregation.judging import Judgement
from coordinator.run.live_run import Change
from coordinator.store.tables import ContributionRow

ADVICE = "In a script, use units(), or seed the batches with diloco.data_seed"


def report_equal_work(change: Change, round_: int, fragment: int) -> None:
    """Record an event if contributions to the fragment have the same loss and norm, bit for bit. Different hardware
    rounds differently, so this finds only workers on identical hardware."""
    rows = change.session.execute(
        select(ContributionRow.worker, ContributionRow.loss, ContributionRow.norm)
        .where(ContributionRow.run_id == change.run.id)
        .where(ContributionRow.round == round_, ContributionRow.fragment == fragment)
        .order_by(ContributionRow.worker)
    )
    equal: dict[tuple[float | None, float], list[str]] = defaultdict(list)
    for worker, loss, norm in rows:
        equal[loss, norm].append(worker)
    for (loss, norm), workers in equal.items():
        if len(workers) > 1:
            loss_text = "" if loss is None else f"loss {loss:.6g}, "
            message = (
                f"{', '.join(workers)} have sent the same contribution ({loss_text}norm {norm:.6g}), as if they "
                f"trained on the same data. Together they add only the work of one worker. {ADVICE}"
            )
            _report(change, round_, fragment, workers, message)


def report_similar_work(change: Change, round_: int, fragment: int, judgement: Judgement) -> None:
    """Record an event if two workers keep sending nearly the same, as if they trained on the same data with different
    dropout seeds or precisions."""
    for pair in change.run.similarity.update(judgement.close, judgement.verdicts):
        one, other = pair
        message = (
            f"{one} and {other} keep sending nearly the same contributions ({judgement.close[pair]:.2f} times the "
            "usual distance), as if they trained on the same data with another dropout seed or precision. They count "
            f"twice, but add little more than the work of one worker. {ADVICE}"
        )
        _report(change, round_, fragment, list(pair), message)


def _report(change: Change, round_: int, fragment: int, workers: list[str], message: str) -> None:
    """Record the event, unless the same group of workers was reported before."""
    row = change.row
    if not any(set(workers) <= set(reported) for reported in row.equal_work):
        row.equal_work = [*row.equal_work, workers]
        change.record("equal", f"round {round_}: {message}", round=round_, fragment=fragment, workers=workers)
