"""One round's sync: every fragment is encoded, uploaded, waited for, decoded and stepped, all of them concurrently.

While fragment 3 uploads, fragment 2 is being averaged and fragment 1 comes down, so that a sync costs about the
larger of upload and download, not their sum. A worker never steps on its own un-averaged pseudo-gradient: only
published deltas are. Once the worker is asked to stop, uploads have the grace, and no delta is waited for.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from protocol import wire
from protocol.codecs import CODECS
from protocol.errors import Problem
from protocol.messages import Stage
from protocol.spec import RunSpec
from worker.client import Client
from worker.codecs import pack_fragment, round_trip, unpack_payload
from worker.errors import Resync, RunEnded, Stopped, UnexpectedAnswer, WorkLost
from worker.grace import Grace
from worker.membership import Membership
from worker.outer_state import OuterState
from worker.work import Carry, Missed, Work, carry_of, count

# One body goes over the line at a time (line.py); meanwhile the next fragment is encoded and the last one acknowledged.
_UPLOADS = 3
_DOWNLOADS = 4
_PAUSE_S = 0.2  # between long polls

# Refusals of a contribution that mean that the round is over for this fragment.
_LATE = ("round-closed", "run-ended")

log = logging.getLogger(__name__)


class _Abandoned(Exception):
    """This fragment was given up because another one failed."""


@contextmanager
def _abandon_others(failed: threading.Event) -> Iterator[None]:
    """Do nothing once another fragment has failed; let the others know of a failure in here."""
    if failed.is_set():
        raise _Abandoned
    try:
        yield
    except Stopped:
        raise  # no failure: whoever still uploads may do so within the grace
    except BaseException:
        failed.set()
        raise


class Sync:
    """The sync of one worker with one run. `device` is where fragments are encoded."""

    def __init__(
        self,
        client: Client,
        membership: Membership,
        spec: RunSpec,
        state: OuterState,
        device: torch.device,
        run_ended: threading.Event,
    ) -> None:
        self._client, self._membership, self._spec = client, membership, spec
        self._state, self._device = state, device
        self._run_ended = run_ended
        self._grace = Grace(client.stop, client.clock)
        self._uploader = client.until(self._grace)
        self._encoding = threading.Lock()

    def run(self, work: Work, saved: Future[None] | None) -> Carry:
        """Contribute `work` and step the outer state by the round's deltas.

        `saved` is the writing of the snapshot of just this. No step changes the state before it is done, and the last
        upload waits for it as well: so the round cannot close with this work in it, and only this process know what
        came of it.

        Returns what of the work goes into the next contribution. Raises Resync where our state is not the run's,
        WorkLost, RunEnded and Stopped; then `state.round` is None if some fragments have been stepped and others have
        not.
        """
        self._state.round = None
        failed = threading.Event()
        with ThreadPoolExecutor(_UPLOADS, "upload") as uploads, ThreadPoolExecutor(_DOWNLOADS, "download") as downloads:

            def contribute(p: int) -> Future[Missed | Tensor | None]:
                with _abandon_others(failed):
                    if saved is not None and p == len(self._state) - 1:
                        saved.result()
                    return downloads.submit(step, p, self._contribute(work, p))

            def step(p: int, missed_by: float | None) -> Missed | Tensor | None:
                with _abandon_others(failed):
                    payload, missed_by = self._await_delta(work, p, missed_by, failed)
                    if saved is not None:
                        saved.result()
                    with self._client.stages(Stage.OUTER_STEP):
                        self._state.step(p, payload)
                    if missed_by is None:
                        return self._unsent(work, p)
                    return Missed(unpack_payload(payload, torch.device("cpu")), missed_by)

            contributions = [uploads.submit(contribute, p) for p in range(len(self._state))]
            wait(contributions)
            steps = [future.result() for future in contributions if future.exception() is None]
            wait(steps)
            if saved is not None:
                wait([saved])  # whatever happened: it reads the state, which changes from here on
        errors = [future.exception() for future in contributions] + [future.exception() for future in steps]
        if all(future.exception() for future in steps):
            self._state.round = work.round  # nothing was stepped, so that nothing is mixed
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, _Abandoned)):
            raise error
        self._state.round = work.round + 1
        left = {p: future.result() for p, future in enumerate(steps)}
        missed = {p: each for p, each in left.items() if isinstance(each, Missed)}
        return carry_of(work, missed, {p: each for p, each in left.items() if isinstance(each, Tensor)})

    def _unsent(self, work: Work, p: int) -> Tensor | None:
        """Of an accepted fragment, what the coordinator does not decode, where the codec has error feedback."""
        codec = self._spec.sync.upload_codec
        if not CODECS[codec].error_feedback:
            return None
        return work.deltas[p] - round_trip(work.deltas[p].to(self._device), codec).cpu()

    def hand_in(self, work: Work) -> None:
        """Contribute `work` before leaving, within the grace, and wait for no delta. What does not get through is told
        in the log: its units return to the pool."""
        self._grace.begin()
        with ThreadPoolExecutor(_UPLOADS, "upload") as uploads:
            contributions = [uploads.submit(self._contribute, work, p) for p in range(len(self._state))]
        kept = 0
        for p, future in enumerate(contributions):
            error = future.exception()
            if isinstance(error, Stopped | Resync | WorkLost):
                log.warning("round %d, fragment %d was not handed in: %s", work.round, p, error)
            elif future.result() is not None:
                log.warning("round %d, fragment %d was not handed in: the round has closed", work.round, p)
            else:
                kept += 1
        if kept:
            log.info("round %d: handed in the work on %d units before leaving", work.round, count(work.units))

    def _contribute(self, work: Work, p: int) -> float | None:
        """None where fragment p is in the delta, or will be; else the share of the round's workers that is in it."""
        sync = self._spec.sync
        vector, late = work.deltas[p].to(self._device), work.late.get(p)
        # One after the other: so the fragment that goes over the line first is ready first.
        with self._encoding, self._client.stages(Stage.ENCODE):
            frames = pack_fragment(vector, sync.upload_codec, zstd=sync.zstd)
        header = wire.ContributionHeader(
            run=self._client.run,
            round=work.round,
            fragment=p,
            codec=sync.upload_codec,
            elements=len(vector),
            chunk_elements=wire.CHUNK_ELEMENTS,
            frame_bytes=[len(frame) for frame in frames],
            worker=self._membership.worker,
            base=self._state.fragment_digest(p),
            tokens=work.weight * self._spec.unit_tokens,
            inner_steps=work.inner_steps,
            loss=work.loss,
            norm=work.norms[p],
            units=work.units,
            carried=late.rounds if late else [],
            carried_share=late.share if late else 1.0,
        )
        try:
            with self._client.stages(Stage.UPLOAD):
                self._membership.act(partial(self._uploader.contribute, header=header, frames=frames))
        except Problem as problem:
            if problem.slug in ("stale-base", "round-not-open"):
                raise Resync(problem.detail) from problem
            if problem.slug == "units-not-held":
                raise WorkLost(problem.detail) from problem
            if problem.slug in _LATE:
                return share_of(problem)
            if problem.slug != "contribution-conflict":  # an earlier upload of ours stands
                raise
        return None

    def _await_delta(
        self, work: Work, p: int, missed_by: float | None, failed: threading.Event
    ) -> tuple[wire.Payload, float | None]:
        """The delta, and what became of the contribution in the end: the coordinator's disk may lose it."""
        limit_bytes = wire.max_payload_bytes(self._spec.sync.download_codec, len(self._state.theta[p]))
        fetch = partial(self._client.delta, work.round, p, limit_bytes)
        while True:
            try:
                with self._client.stages(Stage.AWAIT_DELTA):
                    return self._membership.act(fetch), missed_by
            except Problem as problem:
                if problem.slug in ("gone", "round-not-open"):  # the latter where the run went back to a backup
                    raise Resync(problem.detail) from problem
                if problem.slug == "contribution-lost":
                    log.warning("%s: sending it again", problem.detail)
                    missed_by = self._contribute(work, p)
                elif problem.slug != "not-published":
                    raise
            if failed.is_set():
                raise _Abandoned
            if self._run_ended.is_set():
                raise RunEnded(f"the run ended before the delta of round {work.round}, fragment {p} was published")
            self._client.pause(_PAUSE_S)


def share_of(problem: Problem) -> float:
    """Of a round that closed without us: which share of its workers is in the mean. 1 where that is not told."""
    share = problem.members.get("share", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise UnexpectedAnswer(f"{problem.slug}: the share is {share!r}, not above 0 and at most 1")
    return float(share)
