"""The fragments of one round that are in flight: uploaded, averaged, downloaded and stepped, all at the same time.

While fragment 3 uploads, fragment 2 is averaged and fragment 1 comes down, so a sync takes about the longer of upload
and download, not their sum. The outer state never steps on a worker's own un-averaged pseudo-gradient, only on
published deltas.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import httpx
import torch

from protocol.errors import OuterstepError
from protocol.messages import Stage
from worker.codecs import unpack_payload
from worker.errors import Stopped
from worker.rounds.exchange import UPLOADS, Abandoned, Exchange, Outcome
from worker.state.work import Contribution, Missed, Residual, Superseded, count

DOWNLOADS = 8  # deltas that are waited for at once; more wait for one of these

log = logging.getLogger(__name__)


class InFlight:
    """One round's fragments in flight, each from `send` to `wait`.

        saved            the writing of a snapshot: what is sent after it is uploaded once it is durable, and `end`
                         waits for it; None: nothing is written
        contributions    what was sent, by fragment
        inner_steps      the most that any of them was trained for
        arrived          called on a separate thread once all fragments have been stepped; `arrival` is its result
        steps            the inner steps of the round that are done; `waited_between`: how many they were when the last
                         fragment was uploaded, and when the last delta was published

    From the first `send` until all fragments have been stepped, `state.round` is None; after `end` as well, if only
    some fragments have been stepped.
    """

    def __init__(
        self,
        exchange: Exchange,
        round_number: int,
        saved: Future[None] | None = None,
        arrived: Callable[["InFlight"], Any] | None = None,
        steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self._exchange, self.round, self.saved, self._arrived = exchange, round_number, saved, arrived
        self._steps, self.waited_between = steps, (0, 0)
        self._flights = ThreadPoolExecutor(max(len(exchange.state.own), 1), "fragment")
        self._downloads = ThreadPoolExecutor(DOWNLOADS, "download")
        self._uploading = threading.Semaphore(UPLOADS)
        self._sent: dict[int, Future[Residual]] = {}
        self._turn = threading.Event()  # set when it is the next fragment's turn
        self._turn.set()
        self.contributions: dict[int, Contribution] = {}
        self.inner_steps = 0
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._outcomes: dict[int, tuple[int, Outcome]] = {}  # by fragment that was stepped; the int: its units
        self._ended = False
        self.arrival: Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        """True if anything was sent."""
        return bool(self._sent)

    @property
    def landed(self) -> bool:
        """True if everything that was sent has been stepped and the result of `arrived` is there, or something has
        failed: nothing is left to wait for."""
        if self._failed.is_set():
            return True
        if self.arrival is not None:
            return self.arrival.done()
        return self._arrived is None and all(flight.done() for flight in self._sent.values())

    @property
    def consumed(self) -> int:
        """How many units need not be named again: those of the largest contribution that was accepted."""
        return max((units for units, outcome in self._outcomes.values() if outcome is None), default=0)

    @property
    def superseded(self) -> bool:
        """True if another contribution of this worker stands in the place of one of these."""
        return any(isinstance(outcome, Superseded) for _, outcome in self._outcomes.values())

    def send(self, p: int, make: Callable[[], Contribution]) -> None:
        """On other threads: make the contribution to fragment p, upload it, and step the fragment by the round's delta.
        Fragments are made and uploaded in the order of the calls."""
        self._exchange.state.begin_changes()
        turn, self._turn = self._turn, threading.Event()
        self._sent[p] = self._flights.submit(self._fly, p, make, self.saved, turn, self._turn)

    def send_made(self, contribution: Contribution) -> None:
        """Send a contribution that is made already."""
        self.send(contribution.fragment, lambda: contribution)

    def wait(self, p: int) -> Residual:
        """Wait until fragment p is stepped; return the part of its contribution that is not in the delta. Raises what
        `end` raises."""
        try:
            return self._sent[p].result()
        except Exception:
            self.end()
            raise

    def end(self) -> None:
        """Wait for everything that was sent. The first call raises Resync if the outer state is not the run's,
        WorkLost, RunEnded, Stopped, and what `make` raised."""
        if self._ended:
            return
        self._ended = True
        flights = list(self._sent.values())
        wait(flights)
        if self.saved is not None:
            wait([self.saved])  # in any case: the snapshot reads what changes after this
        self._flights.shutdown()
        self._downloads.shutdown()
        if self._sent and not self._outcomes:
            self._exchange.state.reach(self.round)  # nothing was stepped, so the state is still whole
        errors = filter(None, (flight.exception() for flight in flights))
        for error in sorted(errors, key=lambda error: isinstance(error, Abandoned)):
            raise error

    def abandon(self) -> None:
        """Give up everything in flight: start nothing more, wait for no other machine, and return when all threads are
        done."""
        self._failed.set()
        try:
            self.end()
        except (Abandoned, OuterstepError, httpx.HTTPError, OSError) as error:
            log.info("round %d: given up: %s", self.round, error or type(error).__name__)

    def _fly(
        self,
        p: int,
        make: Callable[[], Contribution],
        saved: Future[None] | None,
        turn: threading.Event,
        next_turn: threading.Event,
    ) -> Residual:
        """Take one fragment from the model to its outer step. Return the part of its contribution that is not in the
        delta."""
        exchange, sent = self._exchange, threading.Event()
        try:
            turn.wait()
            with self._uploading:
                self._check()
                contribution = self.contributions[p] = make()
                if saved is not None:
                    saved.result()
                awaited = partial(exchange.await_delta, contribution, sent, self._failed, self._note_published)
                fetched = self._downloads.submit(awaited)
                outcome = exchange.contribute(contribution, next_turn.set)
            with self._lock:
                self.waited_between = self._steps(), self.waited_between[1]
            sent.set()
            unsent = exchange.unsent(contribution)  # while the delta is waited for
            exchange.state.release_pseudo_gradient(p)
            with exchange.client.stages(Stage.AWAIT_DELTA):
                delta, sent_again = fetched.result()
            outcome = sent_again[-1] if sent_again else outcome
            self._check()
            with exchange.client.stages(Stage.OUTER_STEP):
                exchange.state.step(p, delta)
            self._note_step(contribution, outcome)
            if outcome is None:
                exchange.log_verdict(contribution, delta)
                return unsent
            if isinstance(outcome, Superseded):
                return outcome
            return Missed(unpack_payload(delta, torch.device("cpu"), len(exchange.state.theta[p])), outcome)
        except Stopped:
            raise  # not a failure: other uploads may finish within the grace period
        except BaseException:
            self._failed.set()  # first, so that nothing below starts anything
            raise
        finally:
            next_turn.set()
            sent.set()

    def _note_step(self, contribution: Contribution, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[contribution.fragment] = count(contribution.units), outcome
            self.inner_steps = max(self.inner_steps, contribution.inner_steps)
            if len(self._outcomes) < len(self._exchange.state.own):
                return
            self._exchange.state.reach(self.round + 1)
        if self._arrived is not None:
            self.arrival = self._downloads.submit(self._arrived, self)

    def _note_published(self) -> None:
        with self._lock:
            self.waited_between = self.waited_between[0], self._steps()

    def _check(self) -> None:
        """Raise Abandoned if another fragment has failed."""
        if self._failed.is_set():
            raise Abandoned
