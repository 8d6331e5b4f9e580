"""One round's sync: every fragment is encoded, uploaded, waited for, decoded and stepped, all of them concurrently.

While fragment 3 uploads, fragment 2 is being averaged and fragment 1 comes down, so that a sync costs about the
larger of upload and download, not their sum. A worker never steps on its own un-averaged pseudo-gradient: only
published deltas are. Once the worker is asked to stop, uploads have the grace, and no delta is waited for.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import torch
from torch import Tensor

from protocol import wire
from protocol.codecs import CODECS
from protocol.errors import OuterstepError, Problem
from protocol.messages import Stage
from protocol.spec import RunSpec
from worker.codecs import round_trip, unpack_payload
from worker.errors import Resync, RunEnded, Stopped, UnexpectedAnswer, WorkLost
from worker.link.client import Client
from worker.link.grace import Grace
from worker.link.membership import Membership
from worker.state.outer_state import OuterState
from worker.state.work import Carry, Missed, Piece, Superseded, UnitRanges, Work, carry_of, count, in_order
from worker.tuning.side_stream import SideStream

# One body goes over the line at a time (line.py); meanwhile the next fragment is encoded and the last one acknowledged.
_UPLOADS = 3
_DOWNLOADS = 4
_PAUSE_S = 0.2  # between long polls

# Refusals of a contribution that mean that the round is over for this fragment.
_LATE = ("round-closed", "run-ended")

# What of a fragment is not in the round's delta.
Left = Missed | Superseded | Tensor | None
# What became of a contribution: None, it is in the delta or will be; the share of the round's workers that is in it
# where it came too late; or another one of this worker stands in its place.
Fate = float | Superseded | None

log = logging.getLogger(__name__)


class _Abandoned(Exception):
    """This fragment was given up because another one failed."""


class Flight:
    """The fragments of one round that are on their way: contributed, averaged, fetched, stepped, all of them at once.

    `saved` is the writing of a snapshot, None where none is written; `end` waits for it.
    `arrived` is called once all fragments have been stepped, on a thread of its own. Until then, `state.round` is None;
    after `end` as well, if some fragments have been stepped and others have not.
    """

    def __init__(
        self,
        sync: "Sync",
        round_number: int,
        saved: Future[None] | None,
        arrived: Callable[["Flight"], Any] | None = None,
    ) -> None:
        self._sync, self.round, self.saved, self._arrived = sync, round_number, saved, arrived
        self._uploads = ThreadPoolExecutor(_UPLOADS, "upload")
        self._downloads = ThreadPoolExecutor(_DOWNLOADS, "download")
        self._contributions: dict[int, Future[Future[Left]]] = {}
        self._turn = threading.Event()  # of the fragment that is sent next
        self._turn.set()
        self.pieces: dict[int, Piece] = {}  # that were sent, by fragment
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._stepped: set[int] = set()
        self._ended = False
        self.arrival: Future[Any] | None = None  # of the call of `arrived`
        self.accepted = 0  # units of the contribution that has the most of them, of those that are in a delta
        sync.state.round = None

    def send(self, p: int, make: Callable[[], Piece]) -> None:
        """Make the piece of fragment p, contribute it, and step the fragment by the round's delta: on other threads.
        Whatever is sent first is made first, and goes over the line first."""
        turn, self._turn = self._turn, threading.Event()
        self._contributions[p] = self._uploads.submit(self._contribute, make, turn, self._turn)

    def land(self, p: int) -> Left:
        """Wait until fragment p is stepped; what of it is not in the delta. Raises as `end` does."""
        try:
            return self._contributions[p].result().result()
        except Exception:
            self.end()
            raise

    def end(self) -> None:
        """Wait for all that was sent. Raises Resync where our state is not the run's, WorkLost, RunEnded and Stopped;
        the first time only."""
        if self._ended:
            return
        self._ended = True
        contributions = list(self._contributions.values())
        wait(contributions)
        steps = [future.result() for future in contributions if future.exception() is None]
        wait(steps)
        if self.saved is not None:
            wait([self.saved])  # whatever happened: it reads what changes from here on
        self._uploads.shutdown()
        self._downloads.shutdown()
        if not self._stepped:
            self._sync.state.round = self.round  # nothing was stepped, so that nothing is mixed
        errors = [future.exception() for future in contributions] + [future.exception() for future in steps]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, _Abandoned)):
            raise error

    def abandon(self) -> None:
        """Nobody wants what is under way: begin nothing, wait for nothing that others do, and only then return."""
        self._failed.set()
        try:
            self.end()
        except (_Abandoned, OuterstepError, httpx.HTTPError, OSError) as error:
            log.info("round %d: given up: %s", self.round, error or type(error).__name__)

    def _contribute(self, make: Callable[[], Piece], turn: threading.Event, next_turn: threading.Event) -> Future[Left]:
        turn.wait()
        try:
            with self._abandon_others():
                piece = make()
                self.pieces[piece.fragment] = piece
                return self._downloads.submit(self._step, piece, self._sync.contribute(piece, next_turn.set))
        finally:
            next_turn.set()  # also where it did not get as far as the line

    def _step(self, piece: Piece, fate: Fate) -> Left:
        sync, p = self._sync, piece.fragment
        with self._abandon_others():
            payload, fate = sync.await_delta(piece, fate, self._failed)
            with sync.client.stages(Stage.OUTER_STEP):
                sync.state.step(p, payload)
            self._note_step(piece, fate is None)
            if fate is None:
                return sync.unsent(piece)
            if isinstance(fate, Superseded):
                return fate
            return Missed(unpack_payload(payload, torch.device("cpu")), fate)

    def _note_step(self, piece: Piece, accepted: bool) -> None:
        with self._lock:
            self._stepped.add(piece.fragment)
            if accepted:
                self.accepted = max(self.accepted, count(piece.units))
            if len(self._stepped) < len(self._sync.state):
                return
            self._sync.state.round = self.round + 1
        if self._arrived is not None:
            self.arrival = self._downloads.submit(self._arrived, self)

    @contextmanager
    def _abandon_others(self) -> Iterator[None]:
        """Do nothing once another fragment has failed; let the others know of a failure in here."""
        if self._failed.is_set():
            raise _Abandoned
        try:
            yield
        except Stopped:
            raise  # no failure: whoever still uploads may do so within the grace
        except BaseException:
            self._failed.set()
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
        self.client, self._membership, self._spec = client, membership, spec
        self.state, self._device = state, device
        self._side_stream = SideStream(device)
        self._run_ended = run_ended
        self._grace = Grace(client.stop, client.clock)
        self._uploader = client.until(self._grace)
        self._encoding = threading.Lock()

    def run(
        self,
        work: Work,
        gather: Callable[[int], object] = lambda p: None,
        save: Callable[[], Future[None] | None] = lambda: None,
    ) -> Carry:
        """Contribute `work` and step the outer state by the round's deltas.

        `gather(p)` adds fragment p to `work`, while those before it travel. `save` begins to write the snapshot of just
        this work, all of it; the last upload waits for that: so the round cannot close with this work in it, and only
        this process know what came of it.

        Returns what of the work goes into the next contribution. Raises as `Flight.end` does, and what `gather` raises.
        """
        flight, fragments = Flight(self, work.round, None), range(len(self.state))
        try:
            for p in fragments:
                gather(p)
                if p == fragments[-1]:
                    flight.saved = save()
                flight.send(p, partial(self._piece, work, p, flight.saved))
        except BaseException:
            flight.abandon()
            raise
        flight.end()
        left = {p: flight.land(p) for p in fragments}
        missed = {p: each for p, each in left.items() if isinstance(each, Missed)}
        return carry_of(work, missed, {p: each for p, each in left.items() if isinstance(each, Tensor)})

    @staticmethod
    def _piece(work: Work, p: int, saved: Future[None] | None) -> Piece:
        if saved is not None:
            saved.result()
        return work.piece(p)

    def unsent(self, piece: Piece) -> Tensor | None:
        """Of an accepted fragment, what the coordinator does not decode, where the codec has error feedback."""
        codec = self._spec.sync.upload_codec
        if not CODECS[codec].error_feedback:
            return None
        with self._side_stream.beside():
            return piece.delta - round_trip(piece.delta.to(self._device), codec).cpu()

    def hand_in(self, pieces: Sequence[Piece]) -> None:
        """Contribute `pieces` before leaving, within the grace, and wait for no delta. What does not get through is
        told in the log: its units return to the pool."""
        self._grace.begin()
        with ThreadPoolExecutor(_UPLOADS, "upload") as uploads:
            contributions = [uploads.submit(self.contribute, piece) for piece in pieces]
        kept: list[int] = []
        for piece, future in zip(pieces, contributions, strict=True):
            error = future.exception()
            if isinstance(error, Stopped | Resync | WorkLost):
                log.warning("round %d, fragment %d was not handed in: %s", piece.round, piece.fragment, error)
            elif (fate := future.result()) is not None:
                why = "the round closed" if isinstance(fate, float) else "an earlier contribution stands"
                log.warning("round %d, fragment %d was not handed in: %s", piece.round, piece.fragment, why)
            else:
                kept.append(count(piece.units))
        if kept:
            log.info("round %d: handed in the work on %d units before leaving", pieces[0].round, max(kept))

    def contribute(self, piece: Piece, on_line: Callable[[], object] = lambda: None) -> Fate:
        """Upload `piece`; what became of it. `on_line` is called once the line is the piece's."""
        sync, late = self._spec.sync, piece.late
        with self._encoding, self.client.stages(Stage.ENCODE), self._side_stream.beside():
            frames = self.client.entropy.pack(piece.delta.to(self._device), sync.upload_codec, wanted=sync.zstd)
        header = wire.ContributionHeader(
            run=self.client.run,
            round=piece.round,
            fragment=piece.fragment,
            codec=sync.upload_codec,
            elements=len(piece.delta),
            chunk_elements=wire.CHUNK_ELEMENTS,
            frame_bytes=[len(frame) for frame in frames],
            worker=self._membership.worker,
            base=self.state.fragment_digest(piece.fragment),
            tokens=piece.weight * self._spec.unit_tokens,
            inner_steps=piece.inner_steps,
            loss=piece.loss,
            norm=piece.norm,
            units=piece.units,
            carried=late.rounds if late else [],
            carried_share=late.share if late else 1.0,
        )
        try:
            with self.client.stages(Stage.UPLOAD):
                self._membership.act(partial(self._uploader.contribute, header=header, frames=frames, on_line=on_line))
        except Problem as problem:
            if problem.slug in ("stale-base", "round-not-open"):
                raise Resync(problem.detail) from problem
            if problem.slug == "units-not-held":
                raise WorkLost(problem.detail) from problem
            if problem.slug in _LATE:
                return share_of(problem)
            if problem.slug != "contribution-conflict":
                raise
            # An earlier upload of ours stands. The same work may have other bytes: GPUs do not repeat every bit.
            if not _same_units(problem.members.get("units"), piece.units):
                log.warning("%s, of other work units; it stands", problem.detail)
                return Superseded()
        return None

    def await_delta(self, piece: Piece, fate: Fate, failed: threading.Event) -> tuple[wire.Payload, Fate]:
        """The delta, and what became of the contribution in the end: the coordinator's disk may lose it."""
        p = piece.fragment
        limit_bytes = wire.max_payload_bytes(self._spec.sync.download_codec, len(self.state.theta[p]))
        fetch = partial(self.client.delta, piece.round, p, limit_bytes)
        while True:
            try:
                with self.client.stages(Stage.AWAIT_DELTA):
                    return self._membership.act(fetch), fate
            except Problem as problem:
                if problem.slug in ("gone", "round-not-open"):  # the latter where the run went back to a backup
                    raise Resync(problem.detail) from problem
                if problem.slug == "contribution-lost":
                    log.warning("%s: sending it again", problem.detail)
                    fate = self.contribute(piece)
                elif problem.slug != "not-published":
                    raise
            if failed.is_set():
                raise _Abandoned
            if self._run_ended.is_set():
                raise RunEnded(f"the run ended before the delta of round {piece.round}, fragment {p} was published")
            self.client.pause(_PAUSE_S)


def _same_units(told: Any, units: UnitRanges) -> bool:
    """Return True if a problem's member `units` names the same units, in whatever order and ranges."""
    try:
        return in_order(told) == in_order(units)
    except (TypeError, ValueError):  # it is missing, or no list of ranges
        return False


def share_of(problem: Problem) -> float:
    """Of a round that closed without us: which share of its workers is in the mean. 1 where that is not told."""
    share = problem.members.get("share", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise UnexpectedAnswer(f"{problem.slug}: the share is {share!r}, not above 0 and at most 1")
    return float(share)
