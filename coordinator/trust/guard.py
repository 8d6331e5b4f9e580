"""The guard: what happens when a run's model looks spoilt, according to `guard` in its spec.

Contributions are judged one by one before they are averaged (`aggregation/judging.py`). Harm that passes this, such as
a bias within the bounds or a wrong majority, shows in the values of the state and in the held-out loss. Then the guard
records the event `spoilt` and pauses the run in the same transaction. It may also order a rollback to a checkpoint and
exclude the workers that stand out. The rollback must wait for running jobs, so a later tick executes it
(`upkeep/rolling_back.py`).

The guard's decisions are durable in `runs.guard` (`GuardRecord`). Events only report them, and may be deleted.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from sqlalchemy import select

from coordinator.aggregation.state_file import BOUND
from coordinator.run.live_run import Change, LiveRun
from coordinator.store.tables import CheckpointRow, EvaluationRow, FragmentRow, RunRow, WorkerRow
from coordinator.trust import held_out
from protocol.messages import Evaluation, RunState

GUARD = "the guard"

STANDS_OUT = 0.25  # a rollback bans workers below this share of the others' median cosine
SUSPECTED = 0.5  # workers below this share are only reported, and only once the loss no longer falls
FLAT = 4  # states in a row without a new lowest loss
LEAST_ROUNDS = 2  # rounds that a worker must have contributed to before it can stand out


# --- pure: whether the model looks spoilt, and which workers stand out ------------------------------------------------


@dataclass(frozen=True)
class Rise:
    """A held-out loss that is too high in two evaluated states in a row. `round` and `loss` are those of the later
    state, `good` is the last state before them whose loss was not too high, and `lowest` is the lowest loss so far, in
    nats per token."""

    round: int
    loss: float
    good: int
    lowest: float


@dataclass(frozen=True)
class CountedContribution:
    """How one worker's contribution to one fragment counted: with `factor` times its weight, and with this median
    cosine."""

    factor: float
    cosine: float | None


def risen(losses: Sequence[tuple[int, float]], most: float) -> Rise | None:
    """Return the rise if the newest two losses both exceed the lowest of all by more than `most`; otherwise None. A
    single high loss may be a wrong measurement. `losses`: (state, nats per token), oldest first."""
    if len(losses) < 3:
        return None
    lowest = min(loss for _, loss in losses)
    if not all(_is_above(loss, lowest + most) for _, loss in losses[-2:]):
        return None
    good = max(round_ for round_, loss in losses if not _is_above(loss, lowest + most))
    return Rise(*losses[-1], good, lowest)


def _is_above(loss: float, bound: float) -> bool:
    return not loss <= bound  # true for NaN


def stopped_falling(losses: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """Return the lowest (state, loss) before the newest FLAT states, if none of those has a lower loss; otherwise, or
    with too few losses, None. `losses`: (state, nats per token), oldest first."""
    before, newest = losses[:-FLAT], losses[-FLAT:]
    if not before:
        return None
    lowest = min(before, key=lambda each: each[1])
    return None if any(loss < lowest[1] for _, loss in newest) else lowest


def suspects(parts: Mapping[str, Sequence[CountedContribution]], share: float = STANDS_OUT) -> list[str]:
    """Return the workers that stand out: most of their contributions were shortened or left out, or their mean cosine
    was less than `share` of the others' median. Empty if half of the workers or more stand out."""
    known = {worker: each for worker, each in parts.items() if len(each) >= LEAST_ROUNDS}
    cosines = {
        worker: statistics.fmean(part.cosine for part in each if part.cosine is not None)
        for worker, each in known.items()
        if any(part.cosine is not None for part in each)
    }
    found = {
        worker
        for worker, each in known.items()
        if 2 * sum(part.factor < 1 for part in each) > len(each) or _differs(cosines, worker, share)
    }
    return sorted(found) if 2 * len(found) < len(parts) else []


def most_different(parts: Mapping[str, Sequence[CountedContribution]]) -> tuple[str, str] | None:
    """Return the worker that differs most from the others, and how; None if too few can be compared. It may well be
    honest."""
    cosines = {
        worker: statistics.fmean(known)
        for worker, each in parts.items()
        if (known := [part.cosine for part in each if part.cosine is not None])
    }
    if len(parts) < 3 or len(cosines) < 2:
        return None
    counted = {worker: statistics.fmean(part.factor for part in each) for worker, each in parts.items()}
    worker = min(sorted(parts), key=lambda each: (counted[each] * cosines.get(each, 0.0), counted[each]))
    others = statistics.median(cosine for other, cosine in cosines.items() if other != worker)
    cosine = f"{cosines[worker]:.3f}" if worker in cosines else "unknown"
    return worker, f"its mean cosine is {cosine}, the others' {others:.3f}; its mean factor is {counted[worker]:.2f}"


def _differs(cosines: Mapping[str, float], worker: str, share: float) -> bool:
    others = [cosine for other, cosine in cosines.items() if other != worker]
    if worker not in cosines or len(others) < 2:
        return False
    typical = statistics.median(others)
    return typical > 0 and cosines[worker] < share * typical


# --- what the guard then does -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuardRecord:
    """What the guard has decided about a run, as `runs.guard` stores it.

    judged     the state of its last report; losses up to it are not judged again. -1: none since the last rollback
    good       the last state that looked sound in that report
    paused     True if the guard has paused the run and no operator has changed the run's state since
    to         the checkpoint of a rollback that is ordered but not executed; None if there is none
    without    the workers to ban with that rollback
    went_back  the checkpoints of the guard's earlier rollbacks
    """

    judged: int = -1
    good: int = -1
    paused: bool = False
    to: int | None = None
    without: Sequence[str] = ()
    went_back: Sequence[int] = ()


def record_of(row: RunRow) -> GuardRecord:
    return GuardRecord(**row.guard)


def _set(change: Change, record: GuardRecord) -> None:
    change.row.guard = asdict(record)


def check_values(change: Change, largest: float, state: int, fragment: int) -> None:
    """After an outer step: report values beyond BOUND in `state`, and pause the run whatever `guard.action` is.
    `largest`: as `MaxMagnitude` has it."""
    if not largest <= BOUND:
        message = f"state {state}, fragment {fragment}: its largest value is {largest:.3g}, beyond {BOUND:g}"
        _report_spoilt(change, message, state, good=state - 1, pauses=True)


def check_loss(change: Change) -> None:
    """After an evaluation: if the held-out loss has risen, report it and pause the run, unless `guard.action` is
    "tell". If it has only stopped falling, report the workers that have stood out since."""
    guard = change.run.spec.guard
    change.session.flush()
    losses = _losses(change)
    rise = risen(losses, guard.loss_rise)
    if rise is None:
        _check_flat_loss(change, losses)
    else:
        message = (
            f"the held-out loss has risen to {rise.loss:.4f} nats per token at state {rise.round}; the lowest was "
            f"{rise.lowest:.4f}, and state {rise.good} is the last one near that"
        )
        _report_spoilt(change, message, rise.round, good=rise.good, pauses=guard.action != "tell")


def _check_flat_loss(change: Change, losses: Sequence[tuple[int, float]]) -> None:
    """Report the workers that have stood out since the held-out loss stopped falling, each worker once per run."""
    lowest = stopped_falling(losses)
    if lowest is None:
        return
    state, loss = lowest
    known = set(
        change.session.scalars(select(WorkerRow.name).where(WorkerRow.run_id == change.run.id, WorkerRow.suspected))
    )
    workers = [worker for worker in suspects(_counted_since(change, state), SUSPECTED) if worker not in known]
    if workers:
        for worker in workers:
            change.worker_row(worker).suspected = True
        message = (
            f"the held-out loss has not fallen since state {state} ({loss:.4f} nats per token). Since then, the "
            f"contributions of {', '.join(workers)} were mostly shortened or left out, or had less than "
            f"{SUSPECTED:.0%} of the usual agreement with the others"
        )
        change.record("suspected", message, state=state, workers=workers)


def has_paused(run: LiveRun, row: RunRow) -> bool:
    """Return True while the guard's pause lasts: no operator has changed the run's state since."""
    return run.state is RunState.PAUSED and record_of(row).paused


def note_operator(change: Change) -> None:
    """Drop the guard's pause and any rollback it has ordered, because an operator has changed the run's state."""
    _set(change, replace(record_of(change.row), paused=False, to=None, without=()))


def note_roll_back(change: Change, to: int, *, by_guard: bool) -> None:
    """Judge all later states again, because the run was rolled back to state `to`."""
    went_back = [*record_of(change.row).went_back, *([to] if by_guard else [])]
    _set(change, GuardRecord(went_back=went_back))


def note_redone(change: Change, state: int) -> None:
    """Judge `state` again, because the round before it was done again."""
    record = record_of(change.row)
    _set(change, replace(record, judged=min(record.judged, state - 1)))


def drop_order(change: Change, why: str) -> None:
    """Drop the ordered rollback because it is not possible, and report why. The run stays paused."""
    record = record_of(change.row)
    message = f"the run cannot be rolled back to state {record.to}: {why}; it stays paused"
    without = list(record.without)
    change.record("spoilt", message, state=record.judged, good=record.good, to=None, without=without, differs=None)
    _set(change, replace(record, to=None, without=()))


def _report_spoilt(change: Change, message: str, state: int, *, good: int, pauses: bool) -> None:
    """Report that the model is spoilt after state `good`, and pause the run or order a rollback."""
    run, record = change.run, record_of(change.row)
    to, without = None, list[str]()
    if (differs := most_different(_counted_since(change, good))) is not None:
        message = f"{message}. Since then {differs[0]} has differed most from the others: {differs[1]}"
    if pauses and not run.ended:
        if run.spec.guard.action == "rollback":
            to, why = _target(change, record, good)
            if to is None:
                message = f"{message}. {why}"
            else:
                without = suspects(_counted_since(change, to))
                banned = ", ".join(without) or "nobody"
                message = f"{message}. The run is rolled back to state {to}; banned: {banned}"
        else:
            message = f"{message}. The run is paused"
        change.set_state(RunState.PAUSED)
        change.wake()
        record = replace(record, paused=True)
    named = None if differs is None else differs[0]
    change.record("spoilt", message, state=state, good=good, to=to, without=without, differs=named)
    _set(change, replace(record, judged=state, good=good, to=to, without=without))


def _target(change: Change, record: GuardRecord, good: int) -> tuple[int | None, str]:
    """Return the checkpoint to roll back to; or None, and the reason why there is none."""
    run, session = change.run, change.session
    to = session.scalars(
        select(CheckpointRow.round)
        .where(CheckpointRow.run_id == run.id, CheckpointRow.round <= good)
        .order_by(CheckpointRow.round.desc())
        .limit(1)
    ).first()
    if to is None:
        return None, "No earlier checkpoint is kept, so the run is paused"
    if to in record.went_back:
        return None, f"The run was already rolled back to state {to}, which did not help, so it is paused"
    return to, ""


def _counted_since(change: Change, since: int) -> dict[str, Sequence[CountedContribution]]:
    """Return how each worker's contributions counted in the deltas from round `since` on."""
    rows = change.session.scalars(
        select(FragmentRow.verdicts).where(FragmentRow.run_id == change.run.id, FragmentRow.round >= since)
    )
    parts: dict[str, list[CountedContribution]] = {}
    for verdicts in rows:
        for worker, verdict in verdicts.items():
            parts.setdefault(worker, []).append(CountedContribution(verdict["factor"], verdict["cosine"]))
    return dict(parts)


def _losses(change: Change) -> list[tuple[int, float]]:
    """Return (state, loss) for every state with a confirmed held-out loss, oldest first. States up to the guard's last
    report are left out, unless the run was rolled back since: then all are judged again."""
    run, session = change.run, change.session
    since = record_of(change.row).judged
    rows = session.scalars(
        select(EvaluationRow)
        .where(EvaluationRow.run_id == run.id, EvaluationRow.round > since, EvaluationRow.confirmed)
        .order_by(EvaluationRow.round)
    )
    by_state: dict[int, list[Evaluation]] = {}
    for row in rows:
        by_state.setdefault(row.round, []).append(held_out.evaluation(row))
    means = {round_: held_out.mean(each) for round_, each in by_state.items()}
    return [(round_, mean.loss) for round_, mean in means.items() if mean is not None]
