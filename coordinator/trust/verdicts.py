"""How much each contribution to a fragment counts: its weight when the fragment closes, and the verdict on it before it
is averaged.

**Weights.** A contribution weighs the tokens of its work, at most one assigned round (`sync/admission.py`). If each
worker has its own H, a worker that was assigned far more than the others could still dominate the mean; and a worker
that answers at once looks like a fast machine. So a weight is at most MOST times the median of the others'.

**Verdicts.** The judging itself is pure (`screening/judging.py`). This module collects the evidence: the measure of
each contribution, taken when it arrived or from its blob after a restart, and the norms of earlier rounds. It also
applies the consequences: units of workers that were left out are trained again, and reputations change.
"""

import logging
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from sqlalchemy import select

from coordinator.run.live_run import Change, LiveRun
from coordinator.run.open_round import AcceptedContribution, OpenRound
from coordinator.screening.judging import (
    CLIPPED,
    CLIPPED_OF_OTHER_DATA,
    CLIPPED_WITH_FEEDBACK,
    LEAST_AGREEMENT,
    Evidence,
    Judgement,
    Verdict,
    judge,
)
from coordinator.screening.measuring import MeasuredContribution, measure_payload
from coordinator.store.blobs import Reader
from coordinator.store.payloads import HashedPayload, ReadBuffer, StoredPayload, sha256_of
from coordinator.store.tables import FragmentRow
from coordinator.trust.quarantine import update_reputations
from coordinator.units.carrying import late_work
from coordinator.units.ledger import unconsume_units
from protocol.codecs import CODECS
from protocol.digest import digest
from protocol.errors import OuterstepError, Problem, WireError, WireFault
from protocol.spec.sections import SyncSpec
from protocol.wire import ContributionHeader, Payload

MOST = 4  # so one of three contributions has at most two thirds of the total weight, and one of nine a third
FEW = 2  # two contributions do not show which weight is usual
EARLIER_ROUNDS = 16
PLAUSIBLE = 2.0  # times the norm of θ

logger = logging.getLogger(__name__)


class NoneValid(OuterstepError):
    """No contribution to a fragment is a valid payload. `reasons`: by worker."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        said = "; ".join(f"{worker}: {reason}" for worker, reason in sorted(reasons.items()))
        super().__init__(f"no contribution is valid: {said}")
        self.workers = sorted(reasons)


def weights(tokens: Mapping[str, int], sync: SyncSpec) -> dict[str, int]:
    """Return the weight of each worker's contribution, in tokens. `tokens`: the tokens of the work in it, by worker.
    Pure."""
    if sync.inner_steps != "auto" or len(tokens) <= FEW:
        return dict(tokens)
    ascending = sorted(tokens.values())
    return {worker: min(own, _weight_limit(ascending, own)) for worker, own in tokens.items()}


def _weight_limit(ascending: Sequence[int], own: int) -> int:
    """Return MOST times the median of the other values. `ascending`: all values, sorted. `own`: the value to leave out.
    If all values are whole work units, so is the result."""
    place, others = bisect_left(ascending, own), len(ascending) - 1
    low, high = (each + (each >= place) for each in ((others - 1) // 2, others // 2))
    return MOST * (ascending[low] + ascending[high]) // 2


def measure_contribution(run: LiveRun, header: ContributionHeader, payload: Payload) -> MeasuredContribution:
    """Measure a contribution, as evidence for its verdict. Raises WireError if a value is not finite, and Problem if
    the contribution claims to carry work that it cannot have."""
    late, missed, all_late = late_work(run, header)
    key = digest(run.context.secret + f"{run.name}/{header.round}/{header.fragment}".encode())
    return MeasuredContribution(measure_payload(payload, key), late, missed, all_late)


def keep_in_memory(run: LiveRun, measured: MeasuredContribution) -> MeasuredContribution | None:
    """Return a copy of `measured` whose memory counts towards the budget for payloads. Return None if the budget has no
    room; then the blob is measured again when needed."""
    memory = run.context.memory.take(measured.measure.direction.nbytes)
    if memory is None:
        return None
    direction = np.frombuffer(memory, np.float16)
    direction[:] = measured.measure.direction
    return replace(measured, measure=replace(measured.measure, direction=direction))


def judge_fragment(
    run: LiveRun,
    round_: int,
    fragment: int,
    contributed: Mapping[str, AcceptedContribution],
    theta_norm: Callable[[], float],
) -> Judgement:
    """Judge the contributions that closed the fragment. `theta_norm` returns the norm of the fragment's θ.

    A contribution whose bytes are no valid payload, which only a direct upload can be, is left out. Raises NoneValid if
    all are. Raises OSError, WireError, ValueError or LookupError if a blob that is read again is not what was
    acknowledged.
    """
    found = {
        worker: each.measured or examine(run, round_, fragment, worker, each) for worker, each in contributed.items()
    }
    invalid = {worker: each for worker, each in found.items() if isinstance(each, str)}
    valid = {worker: each for worker, each in found.items() if not isinstance(each, str)}
    run.not_direct.update(invalid)
    if not valid:
        raise NoneValid(invalid)
    reference = _median_reference(run, round_, fragment)
    total = sum(contributed[worker].tokens for worker in valid)
    evidence = {
        worker: Evidence(
            each.measure,
            weight=contributed[worker].tokens / total,
            work=contributed[worker].tokens / run.spec.unit_tokens,
            late=each.late,
            missed=each.missed,
            all_late=each.all_late,
        )
        for worker, each in sorted(valid.items())
    }
    spec = run.spec
    noisy = spec.privacy is not None and spec.privacy.noise > 0  # noise outweighs the update, in a random direction
    first_of_few = reference is None and len(valid) <= 2 and not noisy
    judgement = judge(
        evidence,
        reference,
        _plausible_norm(theta_norm()) if first_of_few else math.inf,
        rule=spec.sync.aggregation,
        clipped=clip_limit(run),
        least_agreement=LEAST_AGREEMENT if run.shares_data else 0.0,
    )
    left_out = {worker: Verdict(0.0, reason) for worker, reason in invalid.items()}
    return replace(judgement, verdicts=dict(sorted({**judgement.verdicts, **left_out}.items())))


def clip_limit(run: LiveRun) -> float:
    """Return the largest norm of honest contributions to this run, as a multiple of the reference."""
    if not run.shares_data:
        return CLIPPED_OF_OTHER_DATA
    return CLIPPED_WITH_FEEDBACK if CODECS[run.spec.sync.upload_codec].error_feedback else CLIPPED


def examine(
    run: LiveRun, round_: int, fragment: int, worker: str, each: AcceptedContribution
) -> MeasuredContribution | str:
    """Read an accepted contribution and measure it. Return the reason if its worker has uploaded something else to the
    store than a valid payload with the announced digest.

    Raises OSError, WireError, ValueError or LookupError if the blob is missing, unreadable or not what was
    acknowledged.
    """
    name = run.names.contribution(round_, fragment, worker, each.digest)
    if each.sha256 is None:
        with StoredPayload(run.blobs.open(name)) as payload:
            assert isinstance(payload.header, ContributionHeader)
            return measure_contribution(run, payload.header, payload)
    try:
        return _measured(run, run.blobs.open(name), each.digest)
    except (WireError, Problem) as error:
        logger.debug("%s: %s; it is read again from the store", name, error)
    try:
        return _measured(run, run.blobs.open(name, fresh=True), each.digest)
    except (WireError, Problem) as error:
        with run.blobs.open(name, fresh=True) as reader:
            if sha256_of(reader) != each.sha256:
                raise ValueError(f"{name} has other bytes than were uploaded") from error
        return f"it is no valid payload: {error}"


def _measured(run: LiveRun, reader: Reader, digest: bytes) -> MeasuredContribution:
    """Measure a payload. Raises WireError and Problem if it is not valid, or has another digest."""
    with HashedPayload(reader, ReadBuffer()) as payload:
        if not isinstance(payload.header, ContributionHeader):
            raise WireError(WireFault.HEADER, f"it is a {payload.header.kind}")
        measured = measure_contribution(run, payload.header, payload)
        if not payload.is_intact(digest):
            raise WireError(WireFault.LENGTH, "its BLAKE3 digest is not the announced one")
        return measured


def _median_reference(run: LiveRun, round_: int, fragment: int) -> float | None:
    """Return the median reference norm of the fragment's last EARLIER_ROUNDS rounds; None if there are none."""
    earlier = (
        select(FragmentRow.reference)
        .where(FragmentRow.run_id == run.id, FragmentRow.fragment == fragment)
        .where(FragmentRow.round < round_, FragmentRow.round >= round_ - EARLIER_ROUNDS)
        .where(FragmentRow.reference.is_not(None))
    )
    with run.context.database.read() as session:
        references = [each for each in session.scalars(earlier) if each is not None]
    return statistics.median(references) if references else None


def _plausible_norm(theta_norm: float) -> float:
    """Return a norm that no honest first round exceeds: infinite if θ is all zeros, because that shows no scale."""
    return PLAUSIBLE * theta_norm if theta_norm > 0 else math.inf


def report_verdicts(change: Change, round_: int, fragment: int, judgement: Judgement) -> None:
    """Record an event for each worker that is left out or shortened, unless an earlier fragment of the round already
    had one. Call it before the fragment's verdicts are stored."""
    reported = _reported(change, round_) if any(each.reason for each in judgement.verdicts.values()) else set()
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
        change.row.tokens -= units * run.spec.unit_tokens
        change.worker_row(worker).tokens -= units * run.spec.unit_tokens
    update_reputations(change, opening.number, factors)
