"""This worker's place in the run: it joins, and joins again whenever its lease has ended.

The membership of a worker of several processes: rank 0 holds the lease, and all act with its member token.

The heartbeat: a thread that renews the lease three times per term and learns whether the run still wants this
worker.
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

# At most, between joining again and again: a coordinator that refuses the tokens it has just given is not to be loaded.
_PAUSE_S = 10


class Membership:
    """Holds the member token. Thread-safe: of several threads that learn of a lost lease, one joins again."""

    def __init__(self, client: Client, worker: str, request: JoinRequest, files: StateDir | None) -> None:
        self.client = client
        self.worker = worker
        self._request = request
        self._files = files
        self._lock = threading.Lock()
        self._token = ""
        self.epoch = 0  # changes whenever the worker has joined again
        self.rows: int | None = None  # of the data set that a script's loader draws the run's units from

    def describe(self, data: DataSummary) -> None:
        """Join with this training set, which the coordinator compares between workers."""
        self._request = self._request.model_copy(update={"data": data})

    def has_rows(self, rows: int, *, joined: bool) -> None:
        """Have the length of the data set that the run's units are drawn from, the first one's if there are several,
        compared between workers: at once if this one has `joined`. Raises Problem `data-mismatch` if it differs."""
        if self.rows is None:
            self.rows = rows
            if joined:
                self.act(lambda token: self.client.assignment(token, self.worker, None, rows=rows))

    def join(self) -> JoinReply:
        """Join or rejoin. Raises Problem where the coordinator refuses for good."""
        with self._lock:
            tokens = self._files.member_tokens() if self._files else MemberTokens(None, None)
            return self._join(tokens.current, tokens.proposed)

    def act(self, call: Callable[[str], T]) -> T:
        """Return `call(member_token)`; where the lease has ended, join again and call again.

        As often as it takes: a call may hang for longer than a lease lasts, time and again.
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
                    log.warning("this worker's lease has ended (%s); joining again", reason)
                    self._renew(token)

    def start_over(self) -> None:
        """Leave and join again: whatever units this worker still holds return to the pool."""
        with self._lock:
            try:
                self.client.give_up(self._token, self.worker)
            except Problem as problem:
                if problem.slug != "unauthorized":  # the lease ended by itself; the units are back already
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
        """Get another token than the one whose lease has `ended`."""
        self._join(ended)

    def _join(self, previous: str | None, proposed: str | None = None) -> JoinReply:
        """Propose a token, so that the join can be repeated by this process, or by the next one after a kill -9."""
        proposed = proposed or f"ost_{secrets.token_urlsafe(32)}"
        if self._files:
            self._files.save_member_tokens(MemberTokens(previous, proposed))
        request = self._request.model_copy(update={"previous": previous, "member_token": proposed})
        reply = self.client.join(self.worker, request)
        if difference := first_difference(reply.layout.tensors, request.tensors):  # memory is taken for the layout
            raise UnexpectedAnswer(f"the coordinator's layout is not of this worker's model: {difference}")
        self._token, self.epoch = reply.member_token, reply.epoch
        if self._files:
            self._files.save_member_tokens(MemberTokens(reply.member_token, None))
        return reply


_TOKEN = "member-token"
_POLL_S = 0.2  # between looks at the store


class SharedMembership(Membership):
    """Rank 0 joins, and puts each new member token where all `ranks` find it; the others wait for it there. Its
    heartbeat alone finds out within a third of a lease that this has ended, so they never wait for long.

    To be made by all processes at once.
    """

    def __init__(self, client: Client, worker: str, request: JoinRequest, files: StateDir | None, ranks: Ranks) -> None:
        super().__init__(client, worker, request, files)
        self._ranks, self._store = ranks, ranks.store()

    def join(self) -> JoinReply:
        reply = self._ranks.by_first(super().join)
        self._token = reply.member_token
        return reply

    def start_over(self) -> None:
        self._ranks.by_first(super().start_over)

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
    """The thread that renews the lease, from `with` to its end. `run_ended` is set whenever the coordinator says
    `stop`; `failure` is what ended it early."""

    def __init__(self, membership: Membership, lease_s: float, metrics: Callable[[], Metrics]) -> None:
        self._done, self._wake = threading.Event(), threading.Event()
        # It goes on while the worker that was asked to stop finishes its step: the lease must last until it leaves.
        # And a lost answer must not cost the lease: there is time for another try.
        self._client = membership.client.until(self._done, silence_s=lease_s / 3)
        self._membership, self._metrics = membership, metrics
        self._interval_s = lease_s / 3
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.run_ended = threading.Event()
        self._directive = Directive.CONTINUE
        self.failure: OuterstepError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._wake.set()
        # A request may still be under way; nothing depends on it any more, and the thread is a daemon.
        self._thread.join(timeout=1)

    def beat_now(self) -> None:
        """Renew the lease soon: there is news in the metrics that the coordinator acts upon."""
        self._wake.set()

    def raise_failure(self) -> None:
        """Raise what ended it early, if anything did."""
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
            except OuterstepError as error:
                # A refusal for good, of the rejoin for example. The training loop raises it at its next step.
                self.failure = error
                return

    def beat(self) -> None:
        """Renew the lease, and do what the answer says."""
        worker, metrics = self._membership.worker, self._metrics()
        reply = self._membership.act(lambda token: self._client.renew_lease(token, worker, metrics))
        self._interval_s = reply.lease_s / 3
        if reply.directive is not self._directive and reply.directive is not Directive.CONTINUE:
            log.info("the coordinator says %s: %s", reply.directive, reply.reason)
        self._directive = reply.directive
        if reply.directive is Directive.STOP:
            self.run_ended.set()
