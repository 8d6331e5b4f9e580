"""How much each contribution to a fragment counts: its weight when the fragment closes, and the verdict on it before it
is averaged.

**Weights.** A contribution weighs the tokens of its work, at most one assigned round (`sync/admission.py`). If each
worker has its own H, a worker that was assigned far more than the others could still dominate the mean; and a worker
that answers at once looks like a fast machine. If workers train on until a delta is there, one may claim to have
trained on all of its units. So a weight is at most MOST times the median of the others'.

**Verdicts.** The judging itself is pure (`aggregation/judging.py`), and part of the work on the fragment's bytes
(`aggregation/fragment.py`). This module adds the run's own record to the evidence, such as the norms of earlier rounds.
It also applies the consequences: units of workers that were left out are trained again, and reputations change.
"""

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from sqlalchemy import and_, select
from sqlalchemy.orm import aliased

from coordinator.aggregation.judging import (
    CLIPPED,
    CLIPPED_OF_OTHER_DATA,
    CLIPPED_WITH_FEEDBACK,
    LEAST_AGREEMENT,
    Judgement,
    spread,
)
from coordinator.aggregation.measuring import Measure
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.open_round import OpenRound
from coordinator.run.schedule import round_steps
from coordinator.run.units.ledger import unconsume_units
from coordinator.store.tables import FragmentRow, RoundRow
from coordinator.trust.quarantine import update_reputations
from protocol.codecs import CODECS
from protocol.spec.sections import SyncSpec

MOST = 4  # so one of three contributions has at most two thirds of the total weight, and one of nine a third
FEW = 2  # two contributions do not show which weight is usual
EARLIER_ROUNDS = 16


def weights(tokens: Mapping[str, int], sync: SyncSpec) -> dict[str, int]:
    """Return the weight of each worker's contribution, in tokens. `tokens`: the tokens of the work in it, by worker.
    Pure."""
    if sync.wait == "always" or len(tokens) <= FEW:
        return dict(tokens)
    ascending = sorted(tokens.values())
    return {worker: min(own, _weight_limit(ascending, own)) for worker, own in tokens.items()}


def _weight_limit(ascending: Sequence[int], own: int) -> int:
    """Return MOST times the median of the other values. `ascending`: all values, sorted. `own`: the value to leave out.
    If all values are whole work units, so is the result."""
    place, others = bisect_left(ascending, own), len(ascending) - 1
    low, high = (each + (each >= place) for each in ((others - 1) // 2, others // 2))
    return MOST * (ascending[low] + ascending[high]) // 2


def keep_in_memory(run: LiveRun, measured: Measure) -> Measure | None:
    """Return a copy of `measured` whose memory counts towards the budget for payloads. Return None if the budget has no
    room; then the blob is measured again when needed."""
    memory = run.context.memory.take(measured.direction.nbytes)
    if memory is None:
        return None
    direction = np.frombuffer(memory, np.float16)
    direction[:] = measured.direction
    return replace(measured, direction=direction)


class Screening(NamedTuple):
    """How the contributions to a fragment are judged; `Aggregate` describes the fields."""

    usual: float | None
    usual_spread: float | None
    clipped: float
    least_agreement: float


def screening(run: LiveRun, round_: int, fragment: int) -> Screening:
    """Return how the contributions to a fragment are judged, according to the run's record."""
    usual, usual_spread = _usual(run, round_, fragment)
    least_agreement = LEAST_AGREEMENT if run.shares_data else 0.0
    return Screening(usual, usual_spread, clip_limit(run), least_agreement)


def clip_limit(run: LiveRun) -> float:
    """Return the largest norm of honest contributions to this run, as a multiple of the reference."""
    if not run.shares_data:
        return CLIPPED_OF_OTHER_DATA
    return CLIPPED_WITH_FEEDBACK if CODECS[run.spec.sync.upload_codec].error_feedback else CLIPPED


def _usual(run: LiveRun, round_: int, fragment: int) -> tuple[float | None, float | None]:
    """Return the medians of the fragment's last EARLIER_ROUNDS rounds: of the reference norm, and of the spread of
    agreements; None if there are none. Rounds that were less than half as long as this one, such as a first one in
    which no worker's speed was known, show no usual norm: much less was trained in them."""
    own, following = aliased(RoundRow), aliased(RoundRow)
    earlier = (
        select(FragmentRow.reference, FragmentRow.verdicts, following.step - own.step)
        .join(own, and_(own.run_id == FragmentRow.run_id, own.round == FragmentRow.round))
        .join(following, and_(following.run_id == FragmentRow.run_id, following.round == FragmentRow.round + 1))
        .where(FragmentRow.run_id == run.id, FragmentRow.fragment == fragment)
        .where(FragmentRow.round < round_, FragmentRow.round >= round_ - EARLIER_ROUNDS)
        .where(FragmentRow.reference.is_not(None))
    )
    with run.context.database.read() as session:
        rows = session.execute(earlier).all()
    references = [norm for norm, _, steps in rows if norm is not None and 2 * steps >= round_steps(run)]
    found = [spread(each["cosine"] for each in verdicts.values()) for _, verdicts, _ in rows]
    spreads = [each for each in found if each is not None]
    return (statistics.median(references) if references else None, statistics.median(spreads) if spreads else None)


def report_verdicts(change: Change, round_: int, fragment: int, judgement: Judgement) -> None:
    """Record an event for each worker that is left out or shortened, unless an earlier fragment of the round already
    had one. Call it before the fragment's verdicts are stored."""
    reported = _reported(change, round_) if any(each.reason for each in judgement.verdicts.values()) else set()
    reported |= change.run.members.harmful(round_).keys()  # as they were quarantined
    for worker, verdict in judgement.verdicts.items():
        if verdict.reason and worker not in reported:
            what = "is left out" if verdict.factor == 0 else f"counts {verdict.factor:.3g} times"
            message = (
                f"round {round_}, first in fragment {fragment}: the contribution of {worker} {what}: {verdict.reason}"
            )
            change.record("screened", message, round=round_, fragment=fragment, worker=worker, factor=verdict.factor)


def _reported(change: Change, round_: int) -> set[str]:
    stored = change.session.scalars(
        select(FragmentRow.verdicts).where(FragmentRow.run_id == change.run.id, FragmentRow.round == round_)
    )
    return {worker for verdicts in stored for worker, verdict in verdicts.items() if verdict["reason"]}


def conclude_round(change: Change, opening: OpenRound) -> None:
    """Once all fragments of a round are judged: return to the pool the units of workers that were left out of every
    fragment, since no model has seen them, and update the reputations."""
    run, session = change.run, change.session
    rows = session.scalars(
        select(FragmentRow.verdicts).where(FragmentRow.run_id == run.id, FragmentRow.round == opening.number)
    ).all()
    factors: dict[str, float] = {}
    for verdicts in rows:
        for worker, verdict in verdicts.items():
            factors[worker] = max(factors.get(worker, 0.0), verdict["factor"])
    for worker in sorted(worker for worker, factor in factors.items() if factor == 0):
        units = unconsume_units(session, run.id, worker, opening.number, live=False)
        tokens = units * run.unit_tokens(worker)
        change.row.tokens -= tokens
        change.worker_row(worker).tokens -= tokens
    update_reputations(change, opening.number, factors)
