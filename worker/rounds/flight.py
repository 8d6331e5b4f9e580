"""The fragments of one round that are on their way: contributed, averaged, fetched, stepped, all of them at once.

While fragment 3 uploads, fragment 2 is being averaged and fragment 1 comes down, so that a sync costs about the larger
of upload and download, not their sum. A worker never steps on its own un-averaged pseudo-gradient: only published
deltas are.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import httpx
import torch
from torch import Tensor

from protocol import wire
from protocol.errors import OuterstepError
from protocol.messages import Stage
from worker.codecs import unpack_payload
from worker.errors import Stopped
from worker.rounds.exchange import UPLOADS, Abandoned, Exchange, Outcome
from worker.state.work import Contribution, Left, Missed, Superseded, count

DOWNLOADS = 8  # threads: a fragment's delta is asked for by one while another waits to step by it

log = logging.getLogger(__name__)


class Flight:
    """The way of one round's fragments, from `send` to `land`.

    saved            the writing of a snapshot, None where none is written: what is sent from then on is uploaded once
                     it is durable, and `end` waits for it
    contributions    those that were sent, by fragment
    inner_steps      the most that one of them was trained for
    arrived          is called once all fragments have been stepped, on a thread of its own; `arrival` is its result

    From the first `send` until all fragments have been stepped, `state.round` is None; after `end` as well, if some
    fragments have been stepped and others have not.
    """

    def __init__(
        self,
        exchange: Exchange,
        round_number: int,
        saved: Future[None] | None = None,
        arrived: Callable[["Flight"], Any] | None = None,
    ) -> None:
        self._exchange, self.round, self.saved, self._arrived = exchange, round_number, saved, arrived
        self._uploads = ThreadPoolExecutor(UPLOADS, "upload")
        self._downloads = ThreadPoolExecutor(DOWNLOADS, "download")
        self._sent: dict[int, Future[Future[Left]]] = {}
        self._turn = threading.Event()  # of the fragment that is sent next
        self._turn.set()
        self.contributions: dict[int, Contribution] = {}
        self.inner_steps = 0
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._outcomes: dict[int, tuple[int, Outcome]] = {}  # of the fragments that are stepped, and how many units
        self._ended = False
        self.arrival: Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        """True if anything was sent."""
        return bool(self._sent)

    @property
    def consumed(self) -> int:
        """How many units need not be named again: those of the largest contribution that was accepted."""
        return max((units for units, outcome in self._outcomes.values() if outcome is None), default=0)

    @property
    def superseded(self) -> bool:
        """True if another contribution of this worker stands in the place of one of them."""
        return any(isinstance(outcome, Superseded) for _, outcome in self._outcomes.values())

    def send(self, p: int, make: Callable[[], Contribution]) -> None:
        """Make the contribution to fragment p, upload it, and step the fragment by the round's delta: on other threads.
        Whatever is sent first is made first, and goes over the line first."""
        self._exchange.state.round = None
        turn, self._turn = self._turn, threading.Event()
        self._sent[p] = self._uploads.submit(self._contribute, p, make, self.saved, turn, self._turn)

    def send_made(self, contribution: Contribution) -> None:
        """`send` what is made already."""
        self.send(contribution.fragment, lambda: contribution)

    def land(self, p: int) -> Left:
        """Wait until fragment p is stepped; return what of it is not in the delta. Raises as `end` does."""
        try:
            return self._sent[p].result().result()
        except Exception:
            self.end()
            raise

    def end(self) -> None:
        """Wait for all that was sent. Raises Resync where our state is not the run's, WorkLost, RunEnded, Stopped, and
        what `make` raised; the first time only."""
        if self._ended:
            return
        self._ended = True
        contributions = list(self._sent.values())
        wait(contributions)
        steps = [future.result() for future in contributions if future.exception() is None]
        wait(steps)
        if self.saved is not None:
            wait([self.saved])  # whatever happened: it reads what changes after this
        self._uploads.shutdown()
        self._downloads.shutdown()
        if self._sent and not self._outcomes:
            self._exchange.state.round = self.round  # nothing was stepped, so that nothing is mixed
        errors = [future.exception() for future in contributions] + [future.exception() for future in steps]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, Abandoned)):
            raise error

    def abandon(self) -> None:
        """Give up what is under way: begin nothing, wait for nothing that others do, and only then return."""
        self._failed.set()
        try:
            self.end()
        except (Abandoned, OuterstepError, httpx.HTTPError, OSError) as error:
            log.info("round %d: given up: %s", self.round, error or type(error).__name__)

    def _contribute(
        self,
        p: int,
        make: Callable[[], Contribution],
        saved: Future[None] | None,
        turn: threading.Event,
        next_turn: threading.Event,
    ) -> Future[Left]:
        turn.wait()
        sent, fetched = threading.Event(), list[Future[tuple[wire.Payload, list[Outcome]]]]()

        def on_line() -> None:
            fetched.append(self._downloads.submit(self._exchange.await_delta, contribution, sent, self._failed))
            next_turn.set()

        try:
            with self._abandon_others():
                contribution = self.contributions[p] = make()
                if saved is not None:
                    saved.result()
                outcome = self._exchange.contribute(contribution, on_line)
                unsent = self._downloads.submit(self._exchange.unsent, contribution)  # while the delta is waited for
                return self._downloads.submit(self._step, contribution, outcome, unsent, fetched[0])
        finally:
            sent.set()
            next_turn.set()  # also where it did not get as far as the line

    def _step(
        self,
        contribution: Contribution,
        outcome: Outcome,
        unsent: Future[Tensor | None],
        fetched: Future[tuple[wire.Payload, list[Outcome]]],
    ) -> Left:
        exchange, p = self._exchange, contribution.fragment
        with self._abandon_others():
            with exchange.client.stages(Stage.AWAIT_DELTA):
                delta, sent_again = fetched.result()
            outcome = sent_again[-1] if sent_again else outcome
            with exchange.client.stages(Stage.OUTER_STEP):
                exchange.state.step(p, delta)
            self._note_step(contribution, outcome)
            if outcome is None:
                exchange.tell_verdict(contribution, delta)
                return unsent.result()
            if isinstance(outcome, Superseded):
                return outcome
            return Missed(unpack_payload(delta, torch.device("cpu"), len(exchange.state.theta[p])), outcome)

    def _note_step(self, contribution: Contribution, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[contribution.fragment] = count(contribution.units), outcome
            self.inner_steps = max(self.inner_steps, contribution.inner_steps)
            if len(self._outcomes) < len(self._exchange.state.own):
                return
            self._exchange.state.round = self.round + 1
        if self._arrived is not None:
            self.arrival = self._downloads.submit(self._arrived, self)

    @contextmanager
    def _abandon_others(self) -> Iterator[None]:
        """Do nothing once another fragment has failed; let the others know of a failure in here."""
        if self._failed.is_set():
            raise Abandoned
        try:
            yield
        except Stopped:
            raise  # no failure: whoever still uploads may do so within the grace
        except BaseException:
            self._failed.set()
            raise
