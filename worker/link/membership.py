"""This worker's membership in the run: it joins, renews its lease, and joins again whenever the lease has ended.

In a worker with several processes, rank 0 holds the lease, and all of them use its member token.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from protocol.errors import OuterstepError, Problem, UnexpectedAnswer
from protocol.fragments import first_difference
from protocol.messages import DataSummary, Directive, JoinReply, JoinRequest, LeaveRequest, Metrics, RoundReport
from worker.errors import Stopped
from worker.link.client import Client
from worker.ranks import Ranks
from worker.state.state_dir import MemberTokens, StateDir

T = TypeVar("T")

log = logging.getLogger(__name__)

# Longest pause between attempts to rejoin, so as not to load a coordinator that refuses the tokens it has just given.
_PAUSE_S = 10


class Membership:
    """Holds the member token. Thread-safe: if several threads notice a lost lease, one of them joins again."""

    def __init__(self, client: Client, worker: str, request: JoinRequest, files: StateDir | None) -> None:
        self.client = client
        self.worker = worker
        self._request = request
        self._files = files
        self._lock = threading.Lock()
        self._token = ""
        self.epoch = 0  # changes whenever the worker has rejoined
        self.rows: int | None = None  # in the data set from which a script's loader draws the run's units

    @property
    def unit_tokens(self) -> int | None:
        """The weight of a unit of this worker's training set; None if it is `RunSpec.unit_tokens`."""
        return None if self._request.data is None else self._request.data.unit_tokens

    def describe(self, data: DataSummary) -> None:
        """Join with this training set, which the coordinator compares between workers."""
        self._request = self._request.model_copy(update={"data": data})

    def report_rows(self, rows: int, *, joined: bool) -> None:
        """Have the coordinator compare the length of the data set that the run's units are drawn from (the first one's,
        if there are several) between workers; at once if this one has `joined`. Raises Problem `data-mismatch` if it
        differs."""
        if self.rows is None:
            self.rows = rows
            if joined:
                self.act(lambda token: self.client.assignment(token, self.worker, None, rows=rows))

    def join(self) -> JoinReply:
        """Join or rejoin. Raises Problem if the coordinator refuses permanently."""
        with self._lock:
            tokens = self._files.member_tokens() if self._files else MemberTokens(None, None)
            return self._join(tokens.current, tokens.proposed)

    def act(self, call: Callable[[str], T]) -> T:
        """Return `call(member_token)`. If the lease has ended, join again and repeat the call.

        As often as needed: a call may hang for longer than a lease lasts, time after time.
        """
        refusals = 0
        while True:
            token = self._token
            try:
                return call(token)
            except Problem as problem:
                if problem.slug != "unauthorized":
                    raise
                reason = problem.detail
            if refusals:
                self.client.pause(min(refusals, _PAUSE_S))
            refusals += 1
            with self._lock:
                if self._token == token:
                    log.warning("this worker's lease has ended (%s); rejoining", reason)
                    self._renew(token)

    def start_over(self) -> None:
        """Leave and join again: all units that this worker still holds return to the pool."""
        with self._lock:
            try:
                self.client.give_up(self._token, self.worker)
            except Problem as problem:
                if problem.slug != "unauthorized":  # the lease has expired already, and the units are back
                    raise
            self._join(None)

    def leave(
        self,
        state_round: int | None,
        state_digest: bytes | None,
        metrics: Metrics,
        report: RoundReport | None = None,
    ) -> None:
        hexadecimal = state_digest.hex() if state_digest else None
        request = LeaveRequest(state_round=state_round, state_digest=hexadecimal, metrics=metrics, report=report)
        self.client.leave(self._token, self.worker, request)

    def _renew(self, ended: str) -> None:
        """Get a new token to replace the one whose lease has `ended`."""
        self._join(ended)

    def _join(self, previous: str | None, proposed: str | None = None) -> JoinReply:
        """Join with a token that this worker proposes, so that this process, or the next one after a kill -9, can
        repeat the join."""
        proposed = proposed or f"ost_{secrets.token_urlsafe(32)}"
        if self._files:
            self._files.save_member_tokens(MemberTokens(previous, proposed))
        request = self._request.model_copy(update={"previous": previous, "member_token": proposed})
        reply = self.client.join(self.worker, request)
        if difference := first_difference(reply.layout.tensors, request.tensors):  # memory is allocated by the layout
            raise UnexpectedAnswer(f"the coordinator's layout does not match this worker's model: {difference}")
        self._token, self.epoch = reply.member_token, reply.epoch
        if self._files:
            self._files.save_member_tokens(MemberTokens(reply.member_token, None))
        return reply


_TOKEN = "member-token"
_POLL_S = 0.2  # between looks at the store


class SharedMembership(Membership):
    """Rank 0 joins and puts each new member token into a store that all `ranks` share; the others wait for it there.
    Its heartbeat notices an ended lease within a third of the term, so they never wait long.

    All processes must make it at once.
    """

    def __init__(self, client: Client, worker: str, request: JoinRequest, files: StateDir | None, ranks: Ranks) -> None:
        super().__init__(client, worker, request, files)
        self._ranks, self._store = ranks, ranks.store()

    def join(self) -> JoinReply:
        reply = self._ranks.on_first(super().join)
        self._token = reply.member_token
        return reply

    def start_over(self) -> None:
        self._ranks.on_first(super().start_over)

    def _renew(self, ended: str) -> None:
        if self._ranks.is_first:
            super()._renew(ended)
            return
        while (token := self._store.get(_TOKEN).decode()) == ended:
            self.client.pause(_POLL_S)
        self._token = token

    def _join(self, previous: str | None, proposed: str | None = None) -> JoinReply:
        reply = super()._join(previous, proposed)
        self._store.set(_TOKEN, reply.member_token)
        return reply


class Heartbeat:
    """A thread that renews the lease three times per term. It runs within `with`. `run_ended` is set whenever the
    coordinator says `stop`; `failure` is the error that ended the thread early."""

    def __init__(self, membership: Membership, lease_s: float, metrics: Callable[[], Metrics]) -> None:
        self._done, self._wake = threading.Event(), threading.Event()
        # It continues while a worker that was asked to stop finishes its step: the lease must last until it leaves.
        # With this timeout, a lost answer leaves time for another attempt.
        self._client = membership.client.until(self._done, silence_s=lease_s / 3)
        self._membership, self._metrics = membership, metrics
        self._interval_s = lease_s / 3
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.run_ended = threading.Event()
        self._directive = Directive.CONTINUE
        self.failure: OuterstepError | OSError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._wake.set()
        # A request may still be running. Nothing depends on it any more, and the thread is a daemon.
        self._thread.join(timeout=1)

    def beat_now(self) -> None:
        """Renew the lease soon: the metrics have changed in a way that the coordinator acts upon."""
        self._wake.set()

    def raise_failure(self) -> None:
        """Raise the error that ended the thread early, if any."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            if self._done.is_set():
                return
            self._wake.clear()
            try:
                self.beat()
            except Stopped:
                return
            except (OuterstepError, OSError) as error:
                # A permanent refusal, of the rejoin for example, or a disk that cannot keep the new token. The training
                # loop raises it at its next step.
                self.failure = error
                return

    def beat(self) -> None:
        """Renew the lease and follow the coordinator's directive."""
        worker, metrics = self._membership.worker, self._metrics()
        reply = self._membership.act(lambda token: self._client.renew_lease(token, worker, metrics))
        self._interval_s = reply.lease_s / 3
        if reply.directive is not self._directive and reply.directive is not Directive.CONTINUE:
            log.info("the coordinator sent the directive %s: %s", reply.directive, reply.reason)
        self._directive = reply.directive
        if reply.directive is Directive.STOP:
            self.run_ended.set()
