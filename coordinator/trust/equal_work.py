"""Workers that have sent the same, or nearly: they train on the same data, and the run has the work of one of them."""

from collections import defaultdict

from sqlalchemy import select

from coordinator.run.live_run import Change
from coordinator.screening.judging import Judgement
from coordinator.store.tables import ContributionRow, EventRow


def tell_equal_work(change: Change, round_: int, fragment: int) -> None:
    """Record an event where contributions to the fragment have the same loss and norm, bit for bit; once for the same
    workers. Boxes of other kinds round differently, so that of theirs nothing is told."""
    rows = change.session.execute(
        select(ContributionRow.worker, ContributionRow.loss, ContributionRow.norm)
        .where(ContributionRow.run_id == change.run.id)
        .where(ContributionRow.round == round_, ContributionRow.fragment == fragment)
        .order_by(ContributionRow.worker)
    )
    alike: dict[tuple[float | None, float], list[str]] = defaultdict(list)
    for worker, loss, norm in rows:
        alike[loss, norm].append(worker)
    for (loss, norm), workers in alike.items():
        if len(workers) > 1 and not _is_recorded(change, workers):
            told = "" if loss is None else f"loss {loss:.6g}, "
            change.record(
                "equal",
                f"round {round_}: {', '.join(workers)} have sent the same ({told}norm {norm:.6g}), as of "
                "training on the same data: they count twice and bring the work of one; a script takes units(), or "
                "seeds its own batches by diloco.data_seed",
                round=round_,
                fragment=fragment,
                workers=workers,
            )


def tell_like_work(change: Change, round_: int, fragment: int, judgement: Judgement) -> None:
    """Record an event where two workers keep sending nearly the same, as if they trained on the same data with another
    dropout seed or precision; once for the same workers."""
    run = change.run
    for pair in run.likeness.see(judgement.alike, judgement.verdicts):
        if not _is_recorded(change, list(pair)):
            one, other = pair
            distance = f"{judgement.alike[pair]:.2f} of the usual distance"
            change.record(
                "equal",
                f"round {round_}: {one} and {other} keep sending nearly the same, at {distance}, as if they trained on "
                "the same data with another dropout seed or precision: they count twice and bring little more than the "
                "work of one; a script takes units(), or seeds its own batches by diloco.data_seed",
                round=round_,
                fragment=fragment,
                workers=list(pair),
            )


def _is_recorded(change: Change, workers: list[str]) -> bool:
    recorded = change.session.scalars(
        select(EventRow.data).where(EventRow.run_id == change.run.id, EventRow.kind == "equal")
    )
    return any(set(workers) <= set(data["workers"]) for data in recorded)
