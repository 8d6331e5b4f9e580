"""Judging the contributions of a fragment, and what follows for those that are left out.

The decision itself is pure (`screening/judging.py`). This module gathers what it needs from the run: what was measured
in each contribution when it arrived (or in its blob, after a restart), and the norms of earlier rounds.
"""

import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from sqlalchemy import select

from coordinator.run.live_run import Change, LiveRun
from coordinator.run.open_round import AcceptedContribution, OpenRound
from coordinator.screening.judging import (
    ALIKE,
    CLIPPED,
    CLIPPED_OF_OTHER_DATA,
    CLIPPED_WITH_FEEDBACK,
    Evidence,
    Judgement,
    judge,
)
from coordinator.screening.measuring import Found, find
from coordinator.store.blobs import FileReader
from coordinator.store.payloads import StoredPayload
from coordinator.store.tables import EventRow, FragmentRow
from coordinator.sync.admission import late_work
from coordinator.sync.state_file import StateReader
from coordinator.trust.quarantine import judge_round
from coordinator.units.ledger import unconsume_units
from protocol.codecs import CODECS
from protocol.digest import digest
from protocol.wire import ContributionHeader, Payload

EARLIER_ROUNDS = 16
PLAUSIBLE = 2.0  # times the norm of θ

logger = logging.getLogger(__name__)


def measure(run: LiveRun, header: ContributionHeader, payload: Payload) -> Found:
    """Measure a contribution and return what it will be judged by. Raises WireError if a value is not finite, and
    Problem if the contribution claims to carry work that it cannot have."""
    late, all_late = late_work(run, header)
    key = digest(run.world.secret + f"{run.name}/{header.round}/{header.fragment}".encode())
    return Found(find(payload, key), late, all_late)


def keep_in_memory(run: LiveRun, found: Found) -> Found | None:
    """Return `found` in memory that counts towards the budget for payloads; None if the budget does not allow it: then
    the blob is measured again when needed."""
    memory = run.world.memory.take(found.measure.direction.nbytes)
    if memory is None:
        return None
    direction = np.frombuffer(memory, np.float16)
    direction[:] = found.measure.direction
    return replace(found, measure=replace(found.measure, direction=direction))


def judge_fragment(
    run: LiveRun, round_: int, fragment: int, contributed: Mapping[str, AcceptedContribution]
) -> Judgement:
    """Judge the contributions with which the fragment closed. Raises OSError, WireError, ValueError or LookupError if a
    blob that has to be read again is not what was acknowledged."""
    found = {
        worker: each.found or _measure_blob(run, round_, fragment, worker, each) for worker, each in contributed.items()
    }
    reference = _median_reference(run, round_, fragment)
    total = sum(each.tokens for each in contributed.values())
    evidence = {
        worker: Evidence(
            found[worker].measure,
            weight=each.tokens / total,
            work=each.tokens / run.spec.unit_tokens,
            late=found[worker].late,
            all_late=found[worker].all_late,
        )
        for worker, each in sorted(contributed.items())
    }
    spec = run.spec
    noisy = (
        spec.privacy is not None and spec.privacy.noise > 0
    )  # noise is longer than any model's pseudo-gradient, and random in direction
    first_of_few = reference is None and len(contributed) <= 2 and not noisy
    return judge(
        evidence,
        reference,
        _plausible_norm(run, round_, fragment) if first_of_few else math.inf,
        rule=spec.sync.aggregation,
        clipped=clip_limit(run),
        alike=ALIKE if run.trains_on_the_same else 0.0,
    )


def clip_limit(run: LiveRun) -> float:
    """Return the norm that honest contributions of this run stay below, as a multiple of the reference."""
    if not run.trains_on_the_same:
        return CLIPPED_OF_OTHER_DATA
    return CLIPPED_WITH_FEEDBACK if CODECS[run.spec.sync.upload_codec].error_feedback else CLIPPED


def _measure_blob(run: LiveRun, round_: int, fragment: int, worker: str, each: AcceptedContribution) -> Found:
    name = run.names.contribution(round_, fragment, worker, each.digest)
    with StoredPayload(run.blobs.open(name)) as payload:
        assert isinstance(payload.header, ContributionHeader)
        return measure(run, payload.header, payload)


def _median_reference(run: LiveRun, round_: int, fragment: int) -> float | None:
    """Return the median reference norm of the fragment's last EARLIER_ROUNDS rounds; None if there are none."""
    earlier = (
        select(FragmentRow.reference)
        .where(FragmentRow.run_id == run.id, FragmentRow.fragment == fragment)
        .where(FragmentRow.round < round_, FragmentRow.round >= round_ - EARLIER_ROUNDS)
        .where(FragmentRow.reference.is_not(None))
    )
    with run.world.database.read() as session:
        references = [each for each in session.scalars(earlier) if each is not None]
    return statistics.median(references) if references else None


def _plausible_norm(run: LiveRun, round_: int, fragment: int) -> float:
    """Return a norm that no honest contribution to a first round exceeds: twice the norm of θ; infinity if θ is 0."""
    squares = 0.0
    with StateReader(FileReader(run.outer.files.path(fragment, round_))) as state:
        for theta, _ in state.read_chunks():
            squares += float(np.dot(theta, theta))
    return PLAUSIBLE * math.sqrt(squares) if squares > 0 else math.inf


def record_events(change: Change, round_: int, fragment: int, judgement: Judgement) -> None:
    """Record an event for each worker whose contribution is left out or clipped, once per round."""
    recorded = _workers_recorded(change, round_) if any(each.reason for each in judgement.verdicts.values()) else set()
    for worker, verdict in judgement.verdicts.items():
        if verdict.reason and worker not in recorded:
            what = "is left out" if verdict.factor == 0 else f"counts {verdict.factor:.3g} times"
            message = (
                f"round {round_}, first in fragment {fragment}: the contribution of {worker} {what}: {verdict.reason}"
            )
            change.record("screened", message, round=round_, fragment=fragment, worker=worker, factor=verdict.factor)


def _workers_recorded(change: Change, round_: int) -> set[str]:
    found = change.session.scalars(
        select(EventRow.data).where(
            EventRow.run_id == change.run.id, EventRow.kind == "screened", EventRow.data["round"].as_integer() == round_
        )
    )
    return {data["worker"] for data in found}


def conclude_round(change: Change, opening: OpenRound) -> None:
    """At the end of a round, with all fragments judged: return to the pool the units of workers that were left out of
    every fragment, because no model has seen them, and update each worker's standing."""
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
    judge_round(change, opening.number, factors)
