"""One fragment's exchange with the coordinator: encode and upload the contribution, wait for the delta and download
it."""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from protocol import wire
from protocol.codecs import CODECS
from protocol.digest import Buffer
from protocol.errors import Problem, UnexpectedAnswer
from protocol.messages import Stage
from protocol.spec.run import RunSpec
from worker.codecs import round_trip
from worker.errors import Resync, RunEnded, Stopped, WorkLost
from worker.link.membership import Membership
from worker.process import GracePeriod
from worker.state.outer_state import OuterState
from worker.state.work import Contribution, Superseded, UnitRanges, count, in_order
from worker.tuning.entropy import Entropy
from worker.tuning.side_stream import SideStream

# One upload at a time uses the line; meanwhile the next fragment is encoded, and the last one acknowledged.
UPLOADS = 3
_PAUSE_S = 0.2  # between long polls
_TELL_EVERY_S = 60.0  # why a delta is not there yet

# Refusals of a contribution that mean that the round is over for this fragment.
_LATE = ("round-closed", "run-ended")

# What became of a contribution. None: it is in the delta, or will be. A float: it came too late, and this share of the
# workers is in the mean. Superseded: another contribution of this worker stands in its place.
Outcome = float | Superseded | None

log = logging.getLogger(__name__)


class Abandoned(Exception):
    """This fragment was given up because another one failed."""


class Exchange:
    """Exchanges fragments with one run. `device` encodes them. Once the worker is asked to stop, uploads have a grace
    period, and no delta is waited for."""

    def __init__(self, membership: Membership, spec: RunSpec, state: OuterState, device: torch.device) -> None:
        self.membership, self.client = membership, membership.client
        self.spec, self.state = spec, state
        self._device = device
        self._side_stream = SideStream(device)
        self._grace = GracePeriod(self.client.stop, self.client.clock)
        self._uploader = self.client.until(self._grace)
        self._encoding = threading.Lock()
        self._logged_at = -math.inf
        self._verdict_logged = -1  # the last round whose verdict was logged
        self._entropy = Entropy(self.client.line.up.rate, self.client.clock)

    def contribute(self, contribution: Contribution, on_line: Callable[[], object] = lambda: None) -> Outcome:
        """Upload `contribution` and return what became of it. `on_line` is called once the upload has a slot.

        Raises Resync if the outer state is not the run's, WorkLost, Stopped, and CodecError for values that the codec
        cannot represent.
        """
        frames = self._encode(contribution)
        header = self._header(contribution, [len(frame) for frame in frames])
        upload = partial(self._uploader.contribute, header=header, frames=frames, on_line=on_line)
        try:
            with self.client.stages(Stage.UPLOAD):
                self.membership.act(upload)
        except Problem as problem:
            if problem.slug in ("stale-base", "round-not-open"):
                raise Resync(problem.detail) from problem
            if problem.slug == "units-not-held":
                raise WorkLost(problem.detail) from problem
            if problem.slug in _LATE:
                return share_of(problem)
            if problem.slug != "contribution-conflict":
                raise
            # An earlier upload of ours stands. The same work may have other bytes: GPUs are not deterministic.
            if not _same_units(problem.members.get("units"), contribution.units):
                log.warning("%s; it contains other work units, and is kept", problem.detail)
                return Superseded()
        return None

    def await_delta(
        self,
        contribution: Contribution,
        sent: threading.Event,
        failed: threading.Event,
        found: Callable[[], None] = lambda: None,
    ) -> tuple[wire.Payload, list[Outcome]]:
        """Wait for the delta and return it, with the outcome of each repeated upload: the coordinator's disk may lose a
        contribution, and then it is sent again. `found` is called once the delta is published.

        Waiting starts before the contribution is `sent`, so that the coordinator already has the question when it has
        the answer. Raises what `contribute` raises, RunEnded, and Abandoned once `failed` is set.
        """
        p, outcomes = contribution.fragment, list[Outcome]()
        limit_bytes = wire.max_payload_bytes(self.spec.sync.download_codec, len(self.state.theta[p]))

        def again(problem: Problem) -> bool:
            if failed.is_set():
                return False
            self._tell(problem)
            self.client.pause(_PAUSE_S)
            return True

        fetch = partial(
            self.client.delta,
            *(contribution.round, p, limit_bytes),
            early=lambda: not sent.is_set(),
            again=again,
            found=found,
        )
        while True:
            try:
                return self.membership.act(fetch), outcomes
            except Problem as problem:
                if problem.slug in ("gone", "round-not-open"):  # the latter if the run was restored from a backup
                    raise Resync(problem.detail) from problem
                if problem.slug == "run-ended":  # it was stopped: a finished run has all deltas
                    raise RunEnded(problem.detail) from problem
                if problem.slug not in ("contribution-lost", "not-published"):
                    raise
                if failed.is_set():
                    raise Abandoned from problem
                if problem.slug == "contribution-lost":
                    log.warning("%s: sending it again", problem.detail)
                    outcomes.append(self.contribute(contribution))
            self.client.pause(_PAUSE_S)

    def log_verdict(self, contribution: Contribution, delta: wire.Payload) -> None:
        """Log, once per round, if an accepted contribution does not count in full in its delta."""
        assert isinstance(delta.header, wire.DeltaHeader)
        factors = {each.worker: each.factor for each in delta.header.contributors}
        factor = factors.get(self.membership.worker, 0.0)
        if factor < 1 and self._verdict_logged != contribution.round:
            self._verdict_logged = contribution.round
            what = "was left out of the mean" if factor == 0 else f"counts {factor:.3g} times in the mean"
            log.warning(
                "round %d: this worker's contribution %s; the run's events and `verdicts` in GET %s show why",
                *(contribution.round, what, f"/v1/runs/{self.client.run}/rounds/{contribution.round}"),
            )

    def _tell(self, problem: Problem) -> None:
        if self.client.clock() >= self._logged_at + _TELL_EVERY_S:
            self._logged_at = self.client.clock()
            log.info("%s", problem.detail)

    def unsent(self, contribution: Contribution) -> Tensor | None:
        """Return what the upload codec lost of an accepted contribution, float32[n]; None if the codec has no error
        feedback."""
        codec = self.spec.sync.upload_codec
        if not CODECS[codec].error_feedback:
            return None
        with self._side_stream.beside():
            return contribution.pseudo_gradient - round_trip(contribution.pseudo_gradient.to(self._device), codec).cpu()

    def hand_in(self, contributions: Sequence[Contribution]) -> None:
        """Upload contributions before leaving, within the grace period, without waiting for deltas. Log what does not
        get through: its units return to the pool."""
        self._grace.begin()
        with ThreadPoolExecutor(UPLOADS, "upload") as uploads:
            results = [uploads.submit(self.contribute, each) for each in contributions]
        accepted: list[int] = []
        for contribution, result in zip(contributions, results, strict=True):
            error = result.exception()
            if isinstance(error, Stopped | Resync | WorkLost):
                reason = str(error)
            elif (outcome := result.result()) is not None:
                reason = "the round closed" if isinstance(outcome, float) else "an earlier contribution stands"
            else:
                accepted.append(count(contribution.units))
                continue
            log.warning(
                "round %d, fragment %d was not contributed: %s", contribution.round, contribution.fragment, reason
            )
        if accepted:
            units = max(accepted)
            log.info("round %d: contributed the work on %d units before leaving", contributions[0].round, units)

    def _encode(self, contribution: Contribution) -> list[Buffer]:
        sync = self.spec.sync
        with self._encoding, self.client.stages(Stage.ENCODE), self._side_stream.beside():
            return self._entropy.pack(
                contribution.pseudo_gradient.to(self._device), sync.upload_codec, wanted=sync.zstd
            )

    def _header(self, contribution: Contribution, frame_bytes: list[int]) -> wire.ContributionHeader:
        late = contribution.late
        return wire.ContributionHeader(
            run=self.client.run,
            round=contribution.round,
            fragment=contribution.fragment,
            codec=self.spec.sync.upload_codec,
            elements=len(contribution.pseudo_gradient),
            chunk_elements=wire.CHUNK_ELEMENTS,
            frame_bytes=frame_bytes,
            worker=self.membership.worker,
            base=self.state.fragment_digest(contribution.fragment),
            tokens=contribution.weight * (self.membership.unit_tokens or self.spec.unit_tokens),
            inner_steps=contribution.inner_steps,
            loss=contribution.loss,
            norm=contribution.norm,
            units=contribution.units,
            carried=late.rounds if late else [],
            carried_share=late.share if late else 1.0,
        )


def _same_units(reported: Any, units: UnitRanges) -> bool:
    """Return True if a problem's member `units` names the same units, in any order and ranges."""
    try:
        return in_order(reported) == in_order(units)
    except (TypeError, ValueError):  # missing, or no list of ranges
        return False


def share_of(problem: Problem) -> float:
    """Return the share of the workers in the mean of a round that closed without this one; 1 if it is not given."""
    share = problem.members.get("share", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise UnexpectedAnswer(f"{problem.slug}: the share is {share!r}, not above 0 and at most 1")
    return float(share)
